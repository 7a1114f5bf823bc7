"""The interpreter of a lowered schedule: a `Step` runs a `Program`, which is one rank's order, once.

`METHODS` maps each op to the method of `Step` that runs it; a handler set with `Pipeline.on` takes its place.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function

from ppedu.core import COPIES, RECEIVE, Action, CommunicationError, F, Op, PipelineError, Result, produces
from ppedu.engine import clock
from ppedu.engine.batch import Batch
from ppedu.engine.program import Program
from ppedu.engine.ranks.device import own_random
from ppedu.engine.ranks.versions import profiling
from ppedu.engine.stages.host import beside
from ppedu.engine.stages.stage import as_tuple

if TYPE_CHECKING:
    from ppedu.engine.context import Context
    from ppedu.engine.stages.head import HeadInStep

Handler = Callable[[Action, "Step"], None]
NOTHING = nullcontext()  # a context that changes nothing


class Step:
    """One step in progress, on one rank. Handlers work with it.

    `default` runs the built-in behavior of an action. A handler that replaces it calls `receive` for the tensors from
    another stage, and `give` with its result. It decides when to wait for messages, which `receive` and `wait` do; the
    measured time of its action starts when the last of these messages has arrived. `add_loss` adds an auxiliary loss.
    `stages` are this rank's, by number; `batch` is the batch as this rank was given it.

    Args:
        number: of the step, from 0, on which random numbers depend.
        kinds: by microbatch; equal for microbatches with messages of equal shapes.
    """

    def __init__(
        self, context: Context, program: Program, batch: Batch, kinds: Sequence[int], number: int, training: bool
    ):
        self.context, self.program, self.batch, self.number, self.training = context, program, batch, number, training
        self.stages, self.placement, self.messages = context.stages, program.placement, context.messages
        if context.batching.variable_shapes:  # each microbatch may have shapes of its own
            kinds = range(len(kinds))
        self.kinds = [(kind, training) for kind in kinds]  # no gradients are sent back in an evaluation
        self.clock = clock.Recorder(context.device)
        self._start: Any = None  # of the current action, by the clock
        self._results: dict[Result, tuple[torch.Tensor, ...]] = {}  # received or given, and not yet used
        self._streams: dict[Action, torch.cuda.Stream] = {}
        self._profiled = profiling()
        self._updates = context.updates if training else {}
        for weights in self._updates.values():
            weights.begin()
        self.messages.begin()
        if context.batching.variable_shapes:
            self.messages.forget_layouts()

    def run(self, first: int = 0, behind: int | None = None) -> None:
        """Run the program, or its instructions from `first` on and before `behind`."""
        handled, sharded = self.context.handlers.keys(), self.context.sharded
        # A handler posts when it wants to. A part that ends at the cut (`Program.cut`) may be discarded, so it must not
        # post a receive from behind the cut, whose message may never come.
        early = behind is None and handled.isdisjoint(RECEIVE)
        part = self.program.instructions[first:behind]
        for index, (action, computes, ops, receives, ahead, completes) in enumerate(part, first):
            try:
                if action.op in COPIES:
                    with beside(self.context.device):
                        self._start = self.clock.now()
                        self._run(action)
                        self.clock.note(action, self._start)
                    continue
                if not computes:
                    self._run(action)
                    continue
                if early:
                    self._post_early(ahead)
                if handled.isdisjoint(ops):  # a handler decides itself when to wait
                    for message in receives:
                        self._accept(message, action)
                if sharded:
                    self.context.shards.wait(action)
                self._start = self.clock.now()
                self._run(action)
                self.clock.note(action, self._start)
                for stage in completes:
                    self.stages[stage].require_learning()
            except CommunicationError as error:
                raise CommunicationError(f"{error} {self.program.around(index)}") from error.__cause__
            except Exception as error:
                why = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
                where = f"rank {self.context.group.rank}: {action} failed"
                raise PipelineError(f"{where}: {why} {self.program.around(index)}") from error
            if not sharded:
                for stage in completes:
                    self.context.gradients.start_mean(stage)
        self.messages.settle()  # the host reads what has arrived from here on

    def discard(self) -> None:
        """Receive and drop all messages that have been sent before the cut, so that they can be sent again."""
        for message in self.program.unread:
            self.post(message)
        for message in [*self.messages.pending]:
            self.messages.wait(message, message, self.context.device)
        self.messages.end()

    def finish(self) -> None:
        """Wait until everything sent has arrived, and synchronize the gradients."""
        self.messages.end()
        self.context.shards.end()
        if self.training:
            self.context.gradients.finish()

    def default(self, action: Action) -> None:
        """Run the built-in behavior of an action."""
        METHODS[action.op](self, action)

    def wait(self, action: Action) -> None:
        """Wait for the messages that an action requires; for a pair, those of both parts.

        Raises:
            CommunicationError: a message is not posted, does not arrive within the timeout, or its sender is gone.
        """
        for message in self.program.receives(action):
            if (message.op.value, message.stage, message.microbatch) not in self._results:
                self._accept(message, action)
                self._start = self.clock.now()

    def receive(self, action: Action) -> tuple[torch.Tensor, ...] | None:
        """Return what a forward or backward gets from another stage; None for the first stage's F and the last's B.

        An R gets what the rank of its forward hands on, if that is another one.

        Waits for its message if that comes from another rank. Each result can be received once.
        """
        source = self.program.source(action)
        if source is None:
            return None
        if source not in self._results:
            self.wait(action)
        values = self._pop(source)
        for value in values:
            if value.is_cuda:  # in a pair, this may be another stream than the tensor's own
                value.record_stream(torch.cuda.current_stream(value.device))
        if source[0] == "F":  # from a stage on this rank, whose graph ends here
            return tuple(map(self._as_input, values))
        return values

    def _as_input(self, y: torch.Tensor) -> torch.Tensor:
        """Return an output as the input of another stage on this rank."""
        if self.training and y.requires_grad:
            return y.detach().requires_grad_()
        return y.clone()  # the stage may change it, and it may be a part of the batch or of a weight

    def give(self, action: Action, values: Any) -> None:
        """Provide the result of a forward (activations) or backward (gradients): a tensor, a tuple or None."""
        for result in produces(action):
            self._results[result] = () if values is None else as_tuple(values)

    def add_loss(self, action: Action, loss: torch.Tensor) -> None:
        """Add an auxiliary loss of this stage to the loss of the action's microbatch, after the stage's forward.

        It counts in the batch's loss, and in the gradients of this stage and those before it, in proportion to the
        microbatch's samples; with reduction="sum", in full.

        Raises:
            PipelineError: it is not one number, or the microbatch is not between its forward and its backward.
        """
        self.stages[action.stage].add_loss(action.microbatch, loss)

    def forward(self, action: Action) -> None:
        stage, m = self.stages[action.stage], action.microbatch
        x = self.receive(action)
        random = NOTHING if self.context.seed is None else self._seeded(action)
        with self._precision, random:
            y = stage.forward(m, x, **self._keywords(action))
        if self.training and self.placement.apart(action.stage):
            self._results["R", action.stage, m] = stage.hand_on(m)
        if action.stage < self.placement.stages - 1:
            self.give(action, y)
        elif self.context.head:
            self.context.head.send(m, y)

    def backward(self, action: Action) -> None:
        stage, head = self.stages[action.stage], self.context.head
        if head and stage is head.last:
            dy: Any = head.gradient(action.microbatch)
            self._start = self.clock.now()
        else:
            dy = self.receive(action)
        run = stage.backward_input if action.op == Op.I else stage.backward
        dx = run(action.microbatch, dy)
        if action.stage > 0:
            self.give(action, dx)

    @property
    def _precision(self) -> Any:
        """The context in which forwards run."""
        dtype = self.context.autocast
        return torch.autocast(self.context.device.type, dtype) if dtype else NOTHING

    def _keywords(self, action: Action) -> dict[str, Any]:
        """Return the keywords of a forward."""
        own = self.batch.stage_keywords.get(action.stage)
        return {**self.batch.keywords[action.microbatch], **(own[action.microbatch] if own else {})}

    def forward_again(self, action: Action) -> None:
        stage, m = self.stages[action.stage], action.microbatch
        if self.placement.apart(action.stage):
            with self._precision:
                stage.take_on(m, self.receive(action) or (), **self._keywords(action))
        stage.forward_again(m)
        self._streams.pop(F(action.stage, action.microbatch), None)  # the graph of R is on the main one

    def copy(self, action: Action) -> None:
        host = self.stages[action.stage].host
        (host.offload if action.op == Op.O else host.load)(action.microbatch)

    def backward_weight(self, action: Action) -> None:
        self.stages[action.stage].backward_weight(action.microbatch)
        self.context.shards.end_backward(action.stage)

    def share_logits(self, action: Action) -> None:
        x = self._head.receive(action.microbatch)
        self._start = self.clock.now()
        self._head.logits(action.microbatch, x)

    def share_gradients(self, action: Action) -> None:
        self._head.told(action.microbatch)
        self._start = self.clock.now()
        self._head.gradients(action.microbatch)

    @property
    def _head(self) -> HeadInStep:
        assert self.context.head
        return self.context.head

    def update(self, action: Action) -> None:
        self.context.updates[action.stage].update()

    def overlapped(self, action: Action) -> None:
        """Run both parts: one after the other on a CPU; on a GPU at the same time, each on a stream of its own.

        A backward runs on the stream of its forward, so the forward of the pair takes the other stream.
        """
        if self.context.device.type != "cuda":
            for part in action.parts:
                self._run(part)
            return
        self.wait(action)  # on the main stream, on which the memory of sent tensors is freed
        main = torch.cuda.current_stream(self.context.device)
        forward, backward = action.parts
        if backward.op == Op.F:
            forward, backward = backward, forward
        backward_stream = self._streams.pop(F(backward.stage, backward.microbatch), main)
        forward_stream = self.context.side_stream if backward_stream == main else main
        self._streams[forward] = forward_stream
        self.context.side_stream.wait_stream(main)
        for part in action.parts:
            with torch.cuda.stream(forward_stream if part == forward else backward_stream):
                self._run(part)
        main.wait_stream(self.context.side_stream)

    def send(self, action: Action) -> None:
        values = self._pop((action.op[-1], action.stage, action.microbatch))
        self.messages.send(action, values, self.kinds[action.microbatch])

    def post(self, action: Action) -> None:
        if action not in self.messages.pending:
            self.messages.receive(action, self.kinds[action.microbatch])

    def _post_early(self, ahead: Iterable[Action]) -> None:
        """Post receives before their place in the order, as far as that changes nothing but the time."""
        for message in ahead:
            if not self.messages.can_be_early(message, self.kinds[message.microbatch]):
                break
            self.post(message)

    def _run(self, action: Action) -> None:
        """Run an action: its handler, if there is one, or the built-in behavior."""
        # Without a profiler, record_function would cost 10 µs an action. A trace shows an action as "PP:2F0".
        weights = self._updates.get(action.stage)
        with record_function(f"PP:{action}") if self._profiled else NOTHING, weights.of(action) if weights else NOTHING:
            if handler := self.context.handlers.get(action.op):
                handler(action, self)
            else:
                METHODS[action.op](self, action)

    def _accept(self, message: Action, user: Action) -> None:
        """Wait for a message that `user` requires, and release earlier sends.

        The sender of the message has received these sends before, so their memory can be freed.
        """
        result = message.op.value, message.stage, message.microbatch
        self._results[result] = self.messages.wait(message, user, self.context.device)
        self.messages.release(self.program.delivered[message])

    def _pop(self, result: Result) -> tuple[torch.Tensor, ...]:
        if result not in self._results:
            kind, stage, m = result
            raise PipelineError(
                f"there is no result of {stage}{kind}{m}: its handler must call step.give(), and each result can be "
                "received once"
            )
        return self._results.pop(result)

    @contextmanager
    def _seeded(self, action: Action) -> Iterator[None]:
        """Start the random number generators at the action's seed, and restore their state at the end."""
        position = (self.context.seed, self.number, action.stage, action.microbatch)
        with own_random(self.context.device):
            torch.manual_seed(zlib.crc32(repr(position).encode()))
            yield


METHODS: dict[Op, Callable[[Step, Action], None]] = {  # how a Step runs each op, unless a handler does
    Op.F: Step.forward,
    Op.B: Step.backward,
    Op.I: Step.backward,
    Op.W: Step.backward_weight,
    Op.R: Step.forward_again,
    Op.O: Step.copy,
    Op.L: Step.copy,
    Op.U: Step.update,
    Op.S: Step.share_logits,
    Op.T: Step.share_gradients,
    Op.OVERLAP_F_B: Step.overlapped,
    Op.OVERLAP_B_F: Step.overlapped,
    Op.SEND_F: Step.send,
    Op.SEND_B: Step.send,
    Op.RECV_F: Step.post,
    Op.RECV_B: Step.post,
    Op.SEND_R: Step.send,
    Op.RECV_R: Step.post,
    Op.UNSHARD: lambda step, action: step.context.shards.unshard(action.stage),
    Op.RESHARD: lambda step, action: step.context.shards.reshard(action.stage),
    Op.REDUCE_GRAD: lambda step, action: step.context.shards.reduce_grad(action),
}


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module], enabled: bool) -> Iterator[None]:
    """If `enabled`, put all modules and their parts in evaluation mode, and at the end back in the mode of each."""
    before = {part: part.training for module in modules for part in module.modules()} if enabled else {}
    for part in before:
        part.training = False
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
