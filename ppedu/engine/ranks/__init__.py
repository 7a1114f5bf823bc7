"""Messages between ranks: tensors come in on one rank and go out on another one, in the order in which they were sent.

`comm` has single messages and groups, `messages` those of a schedule, `alarm` errors of other ranks. `device` has what
depends on the device, and `versions` every private name of torch.
"""
