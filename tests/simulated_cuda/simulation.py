"""Simulated GPU: code whose tensors are on "cuda:0" runs on a machine without one.

Tensors on the simulated device are fake (shapes, dtypes and storages, no numbers), tensors on the
CPU are real. So an operation across devices raises, each wait of the host for the device is
counted, and the peak of the device's memory is known for a model of any size. Numbers that the host
reads from the device are 0.

Not simulated: autocast for CUDA, kernels of bitsandbytes, the loop of `generate`.
"""

import ctypes
import traceback
import weakref
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.cpp_extension import load

import trl_ppo_ext

DEVICE = torch.device("cuda", 0)
PACKAGE = Path(trl_ppo_ext.__file__).parent


def compile_guard():
    """Compile the C++ part, the first time in some seconds; returns the environment of a process
    that simulates."""
    library = load(
        "simulated_cuda_guard", [str(Path(__file__).with_name("guard.cpp"))], is_python_module=False
    )
    return {"LD_PRELOAD": library, "LD_LIBRARY_PATH": str(Path(torch.__file__).with_name("lib"))}


class SimulatedCuda(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits = Counter()  # by "file:function" of the package
        self.bytes = self.peak_bytes = 0
        self.storages = {}

    def __enter__(self):
        ctypes.CDLL(None).simulate(True)
        # in one thread: this mode belongs to it
        self.threads = torch.autograd.set_multithreading_enabled(False)
        # not number by number
        self.tolist = FakeTensor.tolist
        FakeTensor.tolist = lambda x: x.cpu().tolist()
        self.fakes.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.fakes.__exit__(*error)
        FakeTensor.tolist = self.tolist
        self.threads.__exit__(*error)
        ctypes.CDLL(None).simulate(False)

    def place(self, module):
        """Move a module to the simulated device, in place."""
        convert = self.fakes.fake_tensor_converter.from_meta_and_device
        placed = {}
        for part in module.modules():
            for entries in (part._parameters, part._buffers):
                for name, x in entries.items():
                    if x is not None and id(x) not in placed:
                        fake = convert(self.fakes, x.detach().to("meta"), DEVICE)
                        self.allocate(fake)
                        is_parameter = isinstance(x, torch.nn.Parameter)
                        placed[id(x)] = (
                            x,
                            torch.nn.Parameter(fake, x.requires_grad) if is_parameter else fake,
                        )
                    entries[name] = x if x is None else placed[id(x)][1]
        return module

    def allocate(self, x):
        if isinstance(x, FakeTensor) and x.device.type == "cuda":
            storage = x.untyped_storage()
            if storage._cdata not in self.storages:
                self.storages[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.bytes)
                weakref.finalize(storage, self.free, storage._cdata)

    def free(self, key):
        self.bytes -= self.storages.pop(key, 0)

    def wait(self):
        frames = [
            frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents
        ]
        frames = [frame for frame in frames if not frame.name.startswith("<")]  # no comprehensions
        self.waits[
            f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere"
        ] += 1

    def read(self, name, args, kwargs, x):
        """Result of an operation for which the host waits to read numbers of `x`, else
        `NotImplemented`."""
        reads = ("aten._local_scalar_dense", "aten.equal", "aten.allclose", "aten.nonzero")
        masks = []
        if name.startswith(("aten.index.Tensor", "aten.index_put")):
            masks = [
                i
                for i in tree_leaves(args[1])
                if isinstance(i, torch.Tensor) and i.dtype == torch.bool
            ]
        to_host = (
            name.startswith("aten._to_copy")
            and torch.device(kwargs.get("device") or DEVICE).type == "cpu"
        )
        if not (name.startswith(reads) or masks or to_host):
            return NotImplemented
        self.wait()
        if to_host:
            with _disable_current_modes():
                return torch.zeros(x.shape, dtype=kwargs.get("dtype") or x.dtype)
        if masks:
            if "put" in name:
                return args[0]
            return args[0].new_zeros(0, *args[0].shape[masks[0].ndim :])
        if name.startswith("aten.nonzero"):
            return x.new_zeros((0, x.ndim), dtype=torch.long)
        compares = name.startswith(("aten.equal", "aten.allclose"))
        if compares or x.dtype == torch.bool:
            return compares
        if x.is_floating_point():
            return 0.0
        return 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(function)
        # composite operations arrive undivided
        if torch.is_inference_mode_enabled() and function.namespace == "aten":
            super().__enter__()
            try:
                out = function.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
            if out is not NotImplemented:
                return out
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        to_device = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not to_device and not any(isinstance(x, FakeTensor) for x in tensors):
            with _disable_current_modes():
                return function(*args, **kwargs)
        on_device = [x for x in tensors if isinstance(x, FakeTensor) and x.device.type == "cuda"]
        if to_device and tensors and not on_device and not kwargs.get("non_blocking"):
            self.wait()  # a blocking copy to the device
        if on_device:
            out = self.read(name, args, kwargs, on_device[0])
        else:
            out = NotImplemented
        if out is NotImplemented:
            out = function(*args, **kwargs)
            for x in tree_leaves(out):
                self.allocate(x)
        return out
