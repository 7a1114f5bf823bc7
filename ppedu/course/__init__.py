"""The course: what the lessons consist of besides text. Answers come in; feedback, progress and certificates go out.

exercises       checks, hints and predictions, by lesson; my_pipeline, the learner's own file, and its parts
by_hand         training steps written by hand, `tiny`, which runs any schedule, and the museum of bugs
training        the toy GPT, its text, and a training run that can be resumed
board           the puzzle: a schedule made by hand
rehearsal, stepper, fits, graph, memory, menu, map      pictures and controls
project         the running example. drawn: runs for demonstrations
certificates, part_cell, progress_file     what is kept of a learner's results
"""
