"""A CPU that behaves like a GPU with NCCL: it has a queue, and messages whose `wait()` returns before they have come.

Within `Queued()`, torch's operations are put into the queue of a thread that runs them in order; what they return has
the right shape, and random content until then. Only reading a tensor on the host (`item`, `tolist`, `cpu`, …) waits for
the queue, without a time limit. The backend "queued" sends over gloo. Like NCCL, it has one more queue for each pair of
ranks, in which a message waits for what was in the device's queue when it was posted; `wait()` lets the device's queue
wait for the message. Before its first use, such a queue connects the ranks, for which the host waits without a time
limit.
"""

import time
from collections import defaultdict
from queue import SimpleQueue
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ppedu.engine.ranks import device

READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")}
READS |= {torch.equal}


class Mark:
    """A place in a queue, with the time at which it was passed."""

    def __init__(self):
        self.passed, self.time = Event(), None

    def __call__(self):
        self.time = time.monotonic()
        self.passed.set()

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        self.passed.wait()

    def elapsed_time(self, later):
        return 1000 * (later.time - self.time)


class Queue:
    """A thread that runs what it is given, in order."""

    def __init__(self):
        self._work = SimpleQueue()
        Thread(target=self._run, daemon=True).start()

    def _run(self):
        # Autograd has seen each operation when it was put into the queue, and has counted the changes of its tensors.
        changes = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
        with torch._C._AutoDispatchBelowAutograd(), changes:
            while True:
                self._work.get()()

    def put(self, work):
        self._work.put(work)

    def mark(self):
        mark = Mark()
        self.put(mark)
        return mark


MAIN = Queue()
device.is_queue = lambda where: True
device.mark = lambda where: MAIN.mark()
device.synchronize = lambda where=None: MAIN.mark().synchronize()


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):  # if not, newer releases of torch import its compiler, which takes seconds
        return False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        schema = operation._schema
        if not tensors or operation.is_view:
            return operation(*args, **kwargs)
        if operation is torch.ops.aten._local_scalar_dense.default:
            device.synchronize()
            return operation(*args, **kwargs)
        if schema.is_mutable:
            MAIN.put(lambda: operation(*args, **kwargs))
            (changed,) = [place for place, each in enumerate(schema.arguments) if each.alias_info][:1]
            return args[changed] if schema.returns else None
        early = operation(*args, **kwargs)  # for the shapes; what the arguments contain may not be there yet

        def run():
            for place, value in zip(_leaves(early), _leaves(operation(*args, **kwargs)), strict=True):
                place.copy_(value)

        MAIN.put(run)
        return early


def _leaves(value):
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


class _Reads(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            device.synchronize()
        return function(*args, **(kwargs or {}))


class Queued:
    """A context in which the CPU has a queue."""

    def __enter__(self):
        self._modes = [_Operations(), _Reads()]
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        if error[0] is None:
            device.synchronize()


class _Work(dist.Work):
    def __init__(self, queue, start):
        super().__init__()
        ready, self._end = MAIN.mark(), Mark()

        def run():
            ready.synchronize()
            for work in start():
                work.wait()
            self._end()

        queue.put(run)

    def wait(self, timeout=None):
        MAIN.put(self._end.synchronize)
        return True

    def is_completed(self):
        return self._end.query()


class _Group(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store, self._gloo = store, dist.ProcessGroupGloo(store, rank, size, timeout)
        self._queues, self._connected = defaultdict(Queue), set()

    def get_group_store(self):
        return self._store

    @property
    def group_name(self):
        return f"queued {id(self)}"

    def _put(self, queue, start):
        if isinstance(queue, str):
            self._connect("all", lambda: [self._gloo.barrier()])
        else:
            number = [torch.zeros(1)]
            both = [self._gloo.send, self._gloo.recv] if self.rank() < queue else [self._gloo.recv, self._gloo.send]
            self._connect(queue, lambda: (transfer(number, queue, 2) for transfer in both))
        return _Work(self._queues[queue], start)

    def _connect(self, queue, start):
        """Before the first use of a queue, let the host wait until the ranks at the other end use it, too."""
        if queue not in self._connected:
            self._connected.add(queue)
            for work in start():
                work.wait()

    def send(self, tensors, peer, tag):
        return self._put(peer, lambda: [self._gloo.send(tensors, peer, 0)])

    def recv(self, tensors, peer, tag):
        return self._put(peer, lambda: [self._gloo.recv(tensors, peer, 0)])

    def swap(self, messages):
        """Send and receive at the same time, as NCCL does in a batch."""

        def start():
            for each in messages:
                transfer = self._gloo.send if each.op is dist.isend else self._gloo.recv
                yield transfer([each.tensor], each.group_peer, 1)

        return [self._put("one", lambda: list(start()))]

    def allreduce(self, tensors, options):
        return self._put("all", lambda: [self._gloo.allreduce(tensors, options)])

    def allgather(self, rows, tensors, options=None):
        return self._put("all", lambda: [self._gloo.allgather(rows, tensors)])

    def barrier(self, options=None):
        return self._put("all", lambda: [self._gloo.barrier()])

    def getBackendName(self):
        return "queued"


def _create(store, rank, size, timeout):
    return _Group(store, rank, size, timeout)


dist.batch_isend_irecv = lambda messages: (messages[0].group or dist.group.WORLD).swap(messages)
dist.Backend.register_backend("queued", _create, devices=["cpu"])
