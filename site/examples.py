"""Examples to start from, by view of the playground: their words, and the inputs that differ from the usual ones."""

ONE_F_ONE_B = """def one_f_one_b(rank, ranks, microbatches):
    ahead = min(ranks - rank - 1, microbatches)
    for m in range(ahead):
        yield F(rank, m)
    for m in range(ahead, microbatches):
        yield F(rank, m)
        yield B(rank, m - ahead)
    for m in range(microbatches - ahead, microbatches):
        yield B(rank, m)
"""
BY_HAND = """0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""
DEADLOCK = """0F0 0F1 0B1 0B0
1F0 1B0 1F1 1B1
2F1 2F0 2B0 2B1
"""
LLAMA = """model = "llama-3-70b"
machine = "h100"

[plan]
ranks = 4
tensor = 8  # GPUs that split each layer
sequence = 8192
microbatches = 32
zero = 1
replicas = 1
"""
SLOW = """[model]
layers = 16
forward = [0.5, 4, 8]
unit = "ms"
message = 16e6  # bytes between two stages

[machine]
memory = 16e9
bandwidth = 1.25e9  # bytes per second: 10 Gbit/s
latency = 50e-6

[plan]
ranks = 4
microbatches = 16
"""

EXAMPLES: dict[str, dict[str, dict[str, str]]] = {
    "explore": {
        "a bubble of 75%": {"microbatches": "1"},
        "interleaving halves the bubble": {"schedule": "interleaved"},
        "slow links": {"latency": "1"},
        "what GPipe holds": {"schedule": "gpipe", "microbatches": "16"},
    },
    "write": {
        "GPipe as a generator": {},
        "1F1B as a generator": {"text": ONE_F_ONE_B},
        "1F1B by hand": {"text": BY_HAND},
        "one slow stage": {"text": ONE_F_ONE_B, "costs": "forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]"},
        "a deadlock": {"text": DEADLOCK},
    },
    "compare": {
        "GPipe and 1F1B: the same bubble, less memory": {"schedules": "gpipe, 1f1b"},
        "the zero-bubble family": {"schedules": "1f1b, zb-h1, zb-v"},
        "the V schedules: time for memory": {"schedules": "v-min, v-half, zb-v"},
    },
    "differences": {
        "GPipe and 1F1B": {"one": "gpipe", "other": "1f1b"},
        "backwards in two halves": {},
        "depth first and breadth first": {"one": "interleaved", "other": "looped-bfs"},
    },
    "puzzle": {
        "the first board": {},
        "1F1B, begun": {"level": "repeat", "placed": "0F0 0F1 0F2 0F3 1F0 1F1 1F2 2F0 2F1 3F0 3B0 2B0 1B0 0B0"},
        "the board of today": {"level": "today"},
    },
    "plan": {
        "32 layers on 8 GPUs": {},
        "Llama 3 70B on 4 × 8 H100": {"question": LLAMA},
        "16 layers on slow links": {"question": SLOW},
    },
    "atlas": {
        "2 stages on each rank": {},
        "faster than 1F1B, in less memory": {"placement": "line", "memory": "3"},
        "no bubble in the middle": {"memory": "8"},
    },
}
