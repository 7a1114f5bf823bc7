"""The orders that other people's code runs, recorded in one process: what each rank computes, posts and waits for.

`record` has the function and DeepSeek's classes, `megatron` Megatron-LM's loops, and `runtime` torch's own schedules.
`posted` writes down messages, and recognizes their tensors.
"""
