"""Run a schedule on real processes, with torch.distributed.

In come a schedule, the stages of a rank and a batch; out come the loss, exact gradients in the stages' parameters, and
a timeline.

    pipeline        the public class: one training step after the other. `context` checks what it is given
    interpreter     the loop over a rank's actions. `program` is what it runs
    batch           the microbatches of a batch, and their weights in the loss
    gradients       sums over copies, replicas and ties, and the norm of all. `names`: which parameters are one weight;
                    `sharded`: sharded ones
    control         what ranks agree on. post_validation: whether an optimizer step has to be taken back
    clock, results  when actions ran, as a timeline
    precision       mixed precision: a scale for losses, fp32 copies of weights
    memory          the bytes that a rank holds, measured
    emulate         a pipeline whose stages sleep instead of computing
    torchs          a schedule in torch's own runtime
    stages          a rank's pieces of the model, and their checkpoints
    ranks           messages, devices, and what differs between releases of torch
"""
