"""What a CUDA GPU does, in calls of at most ten minutes. A call goes on where earlier ones ended:

    bash benchmarks/speed/gpu.sh
    bash benchmarks/speed/gpu.sh --parts graphs

graphs: sampling by steps. Tokens of CUDA graphs are those of single steps and of `generate`, for
ten families; milliseconds per token of each (steps.py). steps: PPO steps, compared with those of
TRL's trainers and with memory limits. A step is: generate, score, values and reference, advantages,
four epochs of updates. Medians over the steps after the warm-up, peaks of the allocator by phase,
and `estimate_memory`. padding: tokens computed for each real one, and seconds, of packed and padded
micro-batches (padding.py). sampling: tokens per second of each backend (backends.py). overlap:
completions per second with the next rollout sampled beside the updates, on two GPUs (overlap.py).

Models have Qwen2.5's shapes and random weights; only missing packages are downloaded (never torch).
Without bitsandbytes, NF4 is replaced by bf16. Each case runs in its own process with a time limit,
and one that fails does not stop the others. benchmarks/results/gpu.json is written after every
case, and keeps earlier results: a case that this code has done on this device is not run again,
unless by `--again`. A case that cannot be run is skipped, with the reason in the file.

    bash benchmarks/speed/gpu.sh --cases "7B NF4, NF4 reward" "0.5B bf16"
    # tiny models, also on a CPU; installs nothing, judges nothing:
    bash benchmarks/speed/gpu.sh --tiny
"""

import argparse
import configparser
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = HERE.parent / ".environments"
RESULTS = HERE.parent / "results" / "gpu.json"
TINY_RESULTS = ROOT / "runs" / "gpu_tiny.json"
GB = 1e9
ROOM = 22 * GB  # bytes of the weights of all shapes
TRL = "1.12.0"
OPTIONAL = ["liger-kernel"]  # packages of some cases only
MARK = "RESULT "  # prefix of a result in the output of a case
LEAST = 20  # seconds that must be left to begin a case
LIMIT = "BENCHMARK_SECONDS"  # variable with the time limit of a process
PHASES = ("generate", "score", "forward", "update")


@dataclass(frozen=True)
class Case:
    """Measurements of one program on models of one shape."""

    shape: str  # or the family of a tiny model, of "tokens"
    base: str = "bf16"  # or "nf4"
    reward: str = "bf16"  # a classifier of the same shape; "nf4"; or an "adapter" on the base
    program: str = "ours"  # or another one of gpu_case.py
    prompt: int = 128
    response: int = 128
    batch: int = 16  # completions of a micro-batch
    accumulation: int = 1
    reward_batch: int = 16
    checkpointing: bool = False
    warmup: int = 1
    steps: int = 3  # measured
    limit: int = 150  # seconds
    bar: float | None = None  # GB of tensors at the peak
    packs: bool = True  # of "padding"
    attention: str = "sdpa"  # or "flash_attention_2"
    sampler: str = "transformers"  # or "vllm", in the process
    lengths: str = "of many lengths"  # or "of one length"
    liger: bool = False  # with Liger's kernels, of this package
    dequantizes: bool = False  # samples with a copy of the 4-bit base in 16 bits
    generates: bool = False  # beside steps, of "times"

    @property
    def part(self) -> str:
        """Part of the measurements."""
        if self.program in ("tokens", "times"):
            return "graphs"
        if self.program in ("ours", "trl", "grpo"):
            return "steps"
        return self.program

    @property
    def process(self) -> tuple:
        """Common settings of the cases of one process, which loads their model once."""
        if self.program == "tokens":
            return (self.program,)
        return (self.program, self.shape, self.base, self.liger)


LONG: dict[str, Any] = {
    "base": "nf4",
    "response": 512,
    "batch": 4,
    "accumulation": 4,
    "reward_batch": 4,
    "checkpointing": True,
    "warmup": 0,  # a step takes a minute
    "steps": 1,
    "limit": 240,
}
QUICK = LONG | {"response": 64, "warmup": 1}
# of a tiny model each; those with experts and dynamic rotary embeddings may copy from the host
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "mixtral",
    "deepseek_v3",
    "llama, dynamic rope",
)
# most important first, because the time limit may end the run
CASES: dict[str, Case] = {}
for family in FAMILIES:
    CASES[f"{family}, tokens"] = Case(family, base="fp32", program="tokens", limit=60)
for shape, base, kernels, limit in (
    ("0.5B", "bf16", "", 90),
    ("7B", "NF4", "", 240),
    ("0.5B", "bf16", ", Liger", 90),
):
    for number in (16, 64, 4, 128):
        CASES[f"{shape} {base}, {number} rows{kernels}"] = Case(
            f"Qwen2.5-{shape}",
            base=base.lower(),
            program="times",
            batch=number,
            limit=limit,
            liger=bool(kernels),
            generates=number in (16, 4) and not kernels,
        )
CASES |= {
    "0.5B NF4, NF4 reward": Case("Qwen2.5-0.5B", reward="nf4", **QUICK),
    "0.5B NF4, reward adapter": Case("Qwen2.5-0.5B", reward="adapter", **QUICK),
    "7B NF4, NF4 reward": Case("Qwen2.5-7B", reward="nf4", bar=16, **LONG),
    "7B NF4, reward adapter": Case("Qwen2.5-7B", reward="adapter", bar=10.5, **LONG),
    "0.5B bf16": Case("Qwen2.5-0.5B"),
    "0.5B bf16, TRL GRPO": Case("Qwen2.5-0.5B", program="grpo"),
    f"0.5B bf16, TRL {TRL}": Case("Qwen2.5-0.5B", program="trl"),
    "7B NF4, NF4 reward, TRL GRPO": Case("Qwen2.5-7B", reward="nf4", program="grpo", **LONG),
    "1.5B bf16": Case("Qwen2.5-1.5B"),
    "1.5B bf16, TRL GRPO": Case("Qwen2.5-1.5B", program="grpo"),
    f"1.5B bf16, TRL {TRL}": Case("Qwen2.5-1.5B", program="trl"),
    "7B bf16": Case("Qwen2.5-7B"),
    "0.5B NF4, short": Case("Qwen2.5-0.5B", base="nf4", reward="nf4"),
    "1.5B NF4, short": Case("Qwen2.5-1.5B", base="nf4", reward="nf4"),
    "7B NF4, short": Case("Qwen2.5-7B", base="nf4", reward="nf4"),
}
CASES["0.5B bf16, Liger"] = Case("Qwen2.5-0.5B", liger=True)
for number in (16, 128):
    CASES[f"7B NF4, {number} rows, dequantized"] = Case(
        "Qwen2.5-7B", base="nf4", program="times", batch=number, limit=150, dequantizes=True
    )
CASES["7B NF4, reward adapter, dequantized"] = Case(
    "Qwen2.5-7B", reward="adapter", dequantizes=True, **LONG
)
CASES["0.5B bf16, an update"] = Case("Qwen2.5-0.5B", program="updates")
CASES["7B NF4, an update"] = Case(
    "Qwen2.5-7B", program="updates", reward="adapter", **LONG | {"warmup": 1}
)
SAMPLED: dict[str, Any] = {"program": "sampling", "response": 256, "limit": 200}
for shape, base in {"0.5B": "bf16", "7B": "nf4"}.items():
    name = f"{shape} {base.replace('nf4', 'NF4')}"
    model = {"shape": f"Qwen2.5-{shape}", "base": base}
    learned = model | {
        "program": "padding",
        "response": 1024,
        "batch": 8,
        "checkpointing": True,
        "limit": 200,
    }
    CASES[f"{name}, packed"] = Case(**learned)
    CASES[f"{name}, padded"] = Case(**learned, packs=False)
    CASES[f"{name}, packed, flash attention"] = Case(**learned, attention="flash_attention_2")
    CASES[f"{name}, transformers samples"] = Case(**model | SAMPLED)
    CASES[f"{name}, vLLM samples"] = Case(**model | SAMPLED, sampler="vllm")
CASES["0.5B bf16, transformers, one length"] = Case(
    "Qwen2.5-0.5B", **SAMPLED, lengths="of one length"
)
CASES["0.5B bf16, vLLM, one length"] = Case(
    "Qwen2.5-0.5B", **SAMPLED, sampler="vllm", lengths="of one length"
)
for shape in ("0.5B", "7B"):  # trainer and server have the same base
    CASES[f"{shape} bf16, overlap"] = Case(
        f"Qwen2.5-{shape}", program="overlap", response=256, steps=8, limit=270
    )
PARTS = ["graphs", "steps", "updates", "padding", "sampling", "overlap"]


def case_of(name: str, tiny: bool) -> Case:
    """A case as it is run: with tiny sizes, and in bf16 without bitsandbytes."""
    case = CASES[name]
    if tiny:
        case = replace(
            case,
            prompt=6,
            response=8,
            batch=2,
            accumulation=min(case.accumulation, 2),
            steps=1,
            limit=120,
        )
    if importlib.util.find_spec("bitsandbytes") is None and "nf4" in (case.base, case.reward):
        case = replace(case, base="bf16", reward=case.reward.replace("nf4", "bf16"), bar=None)
    return case


# ---- packages ----


def name_of(requirement: str) -> str:
    """Name of a required package."""
    return re.split(r"[^a-z0-9-]", requirement)[0]


def asked_for() -> list[str]:
    """Requirements of setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["options"]["install_requires"].split("\n")


def there(name: str) -> Any:
    """Distribution of an installed package, or None."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacking(requirements: Iterable[str]) -> list[str]:
    """Requirements, direct and transitive, that are missing or too old; torch is never one."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    queue = [x for x in requirements if x.strip()]
    wanted = {}
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name not in wanted and (installed := there(name)) is not None and name != "torch":
            queue += installed.requires or []
        # intersection over all requirements
        wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
    wanted.pop("torch", None)
    return [
        f"{name}{versions}" for name, versions in wanted.items() if not satisfied(name, versions)
    ]


def satisfied(name: str, versions: Any) -> bool:
    """Check if a package is installed in one of these versions."""
    installed = there(name)
    return installed is not None and versions.contains(installed.version, prereleases=True)


def install(requirement: str, target: Path, wheels: str | None) -> None:
    """Install one package into a folder."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--upgrade",
    ]
    if wheels:
        source = ["--no-index", "--find-links", wheels]
    else:
        source = []
    if not wheels and name_of(requirement) != "trl":  # the peer is an older version
        source = ["--constraint", str(ROOT / "constraints.txt")]
    done = subprocess.run(
        [*pip, *source, "--target", str(target), requirement], capture_output=True, text=True
    )
    if done.returncode:
        why = (done.stderr.strip() or "pip failed").splitlines()[-1]
        print(f"not installed: {requirement} ({why})", flush=True)


def provide(wheels: str | None) -> None:
    """Install missing requirements into a folder of their own, as far as they are available."""
    target = ENVIRONMENTS / "gpu"
    tried = set()
    sys.path.insert(0, str(target))
    if importlib.util.find_spec("packaging") is None:  # reads requirements
        install("packaging", target, wheels)
    # new packages may have requirements
    requirements = [*asked_for(), *OPTIONAL]
    while wanted := [x for x in lacking(requirements) if name_of(x) not in tried]:
        for requirement in wanted:
            tried.add(name_of(requirement))
            install(requirement, target, wheels)
        importlib.invalidate_caches()
    if not (ENVIRONMENTS / "trl" / "trl").is_dir():
        install(f"trl=={TRL}", ENVIRONMENTS / "trl", wheels)


def why_not(case: Case) -> str | None:
    """Reason why a case cannot be run, or None."""
    if case.program == "trl" and not (ENVIRONMENTS / "trl" / "trl").is_dir():
        return f"trl {TRL} is not in {(ENVIRONMENTS / 'trl').relative_to(ROOT)}"
    needed = ["torch", "transformers", "accelerate", "peft", "datasets", "trl"]
    needed += ["vllm"] if "vllm" in case.sampler or case.program == "overlap" else []
    needed += ["flash_attn"] if "flash" in case.attention else []
    needed += ["liger_kernel"] if case.liger else []
    if case.liger and not gpus():
        return "Liger's kernels need a GPU"
    if case.program == "overlap" and len(gpus()) == 1:
        return "server and trainer need a GPU each, and there is one"
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return None


# ---- processes ----


def start(arguments: list[str], program: str, **streams: Any) -> subprocess.Popen:
    """Start a process of gpu_case.py, in a group that can be ended as one."""
    if program == "trl":
        first = [str(ENVIRONMENTS / "trl")]
    else:
        first = []
    paths = [*first, str(ROOT), str(ENVIRONMENTS / "gpu"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(x for x in paths if x),
        "HF_HUB_OFFLINE": "1",
    }
    if program != "overlap":  # the Trainer would spread a batch over all GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(
            ","
        )[0]
    command = [sys.executable, str(HERE / "gpu_case.py"), *arguments]
    return subprocess.Popen(
        command, env=os.environ | environment, text=True, process_group=0, **streams
    )


class Limit:
    """Ends a process, and those that it started, after some seconds."""

    def __init__(self, process: subprocess.Popen, seconds: float):
        self.process = process
        self.seconds = max(seconds, 1)
        self.is_over = False
        self.timer = threading.Timer(self.seconds, self._end)
        self.timer.start()

    def _end(self) -> None:
        self.is_over = True
        end(self.process)

    def cancel(self) -> None:
        self.timer.cancel()

    def reason(self) -> str:
        """Reason why the process gave no result."""
        if self.is_over:
            return f"it took more than {self.seconds:.0f} s"
        return f"exit status {self.process.wait()}"


def end(process: subprocess.Popen) -> None:
    """End a process, and those that it started."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)


def make(shapes: Iterable[str], options: list[str], until: float) -> str | None:
    """Write models of these shapes; return the reason of a failure or `None`.

    TRL's process cannot import this package, which makes them.
    """
    directory = Path(options[0])
    for shape in shapes:
        if (directory / shape / "adapter" / "adapter_model.safetensors").exists():
            continue
        process = start([*options, "--make", shape], "ours")
        limit = Limit(process, until - time.monotonic())
        failed = process.wait() != 0
        limit.cancel()
        if failed:
            return f"models were not made: {limit.reason()}"
    return None


def run(
    names: list[str], directory: str, tiny: bool, until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cases in one process; yield each result, also of a part of a case, when it comes.

    The process ends with a case that fails or takes too long, or with the time; cases after it
    have no result.
    """
    program = CASES[names[0]].program
    options = [directory, *(["--tiny"] if tiny else [])]
    if program == "trl":
        failure = make(sorted({CASES[name].shape for name in names}), options, until)
        if failure is not None:
            for name in names:
                yield name, {"status": "failed", "reason": failure}
            return

    def seconds(name: str) -> float:
        return min(case_of(name, tiny).limit, until - time.monotonic())

    waiting = list(names)
    told: dict[str, Any] = {}  # of the case that runs
    os.environ[LIMIT] = str(seconds(waiting[0]))
    with tempfile.TemporaryFile("w+") as errors:
        process = start([*options, *names], program, stdout=subprocess.PIPE, stderr=errors)
        limit = Limit(process, seconds(waiting[0]))
        try:
            for text in process.stdout or ():
                if not text.startswith(MARK):
                    continue
                name, told = json.loads(text.removeprefix(MARK))
                yield name, told
                if told["status"] == "cut short":
                    continue
                limit.cancel()
                waiting.remove(name)
                if told["status"] == "failed" or not waiting or until - time.monotonic() < LEAST:
                    return
                told = {}
                limit = Limit(process, seconds(waiting[0]))
            errors.seek(0)
            told = told or {"status": "failed"}
            told |= {"reason": limit.reason(), "errors": errors.read().strip()[-1500:]}
            yield waiting[0], told
        finally:
            limit.cancel()
            end(process)
            process.wait()


# ---- results ----


def judged(case: Case, result: dict, tiny: bool) -> list[dict]:
    """Each limit with True if it was met; None on a CPU, with tiny models, or for an incomplete
    case."""
    if "estimate" not in result:
        return []
    real = result["status"] == "done" and result["hardware"]["device"] != "cpu" and not tiny
    peak = result["peak_gb"]["allocated"]
    estimate = result["estimate"]["peak_gb"]
    bars: list[tuple[str, bool]] = [
        ("estimate within 10 % of max_memory_allocated", abs(estimate / peak - 1) <= 0.1)
    ]
    if case.bar is not None:
        bars.insert(0, (f"max_memory_allocated at most {case.bar:g} GB", peak <= case.bar))
    return [{"bar": bar, "met": met if real else None} for bar, met in bars]


def read(path: Path) -> dict[str, dict]:
    """Results of the file, if there is one."""
    if not path.exists():
        return {}
    return json.loads(path.read_text())["results"]


@cache
def code() -> str:
    """Digest of the code that is measured, and of that which measures."""
    digest = hashlib.sha256()
    folders = [ROOT / "trl_ppo_ext", HERE, HERE.parent / "peers", HERE.parent / "memory"]
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def is_of_today(name: str, result: dict, tiny: bool) -> bool:
    """Check if a result is of this code, on this device, with the settings of the case."""
    device = gpus()[0] if gpus() else "cpu"
    return (
        result.get("code") == code()
        and result.get("hardware", {}).get("device") == device
        and result["settings"] == asdict(case_of(name, tiny))
    )


def keep(path: Path, results: dict[str, dict]) -> None:
    """Merge results into the file; a skipped case does not replace an earlier result."""
    written = read(path)
    for name, result in results.items():
        if result["status"] != "skipped" or written.get(name, {}).get("status") != "done":
            written[name] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: written[name] for name in [*CASES, *written] if name in written}
    path.write_text(
        json.dumps({"unit": "s, GB of 10^9 bytes", "results": ordered}, indent=1) + "\n"
    )


def line(name: str, result: dict, ours: dict | None) -> str:
    """Row of the table; with `ours`, a row of TRL has the ratio to it."""
    failure = ""
    if result["status"] != "done":
        if "exit" in result["reason"]:
            last = result.get("errors", "").splitlines()[-1:]
        else:
            last = []
        failure = f"{result['status']}: {': '.join([result['reason'], *last])[:160]}"
    if "settings" in result and result["settings"]["base"] != CASES[name].base:
        name += " (in bf16)"
    if "measured" in result:
        return (
            f"{name:35} {', '.join(f'{x} {n:.4g}' for x, n in result['measured'].items())} "
            f"{failure}"
        ).rstrip()
    if "peak_gb" not in result:
        return f"{name:26} {failure}"
    estimate = result.get("estimate", {})
    numbers = (result["median_s"], *(result["peak_gb"][x] for x in ("allocated", "reserved")))
    numbers += (estimate.get("peak_gb"), estimate.get("ratio"))
    cells = " ".join("       -" if x is None else f"{x:8.3f}" for x in numbers)
    phases = ", ".join(f"{phase} {x:.2f}" for phase, x in result.get("phases_s", {}).items())
    if ours is not None:
        phases = f"{result['median_s'] / ours['median_s']:.2f} times ours"
    return f"{name:26} {cells}   {phases} {failure}".rstrip()


def show(names: list[str], results: dict[str, dict]) -> None:
    """Print the table and the limits."""
    titles = " ".join(f"{x:>8}" for x in ("s/step", "peak GB", "reserved", "estimate", "ratio"))
    print(f"\n{'':26} {titles}   phases, s")
    for name in names:
        if CASES[name].program in ("trl", "grpo"):
            ours = results.get(name.split(", TRL")[0])
        else:
            ours = None
        compared = (
            ours
            and ours["status"] == "done"
            and not ours["tiny"]
            and results[name]["status"] == "done"
        )
        print(line(name, results[name], ours if compared else None))
    verdicts = {
        True: "met",
        False: "NOT MET",
        None: "not judged (tiny models, no GPU, or not ended)",
    }
    for name in names:
        for bar in results[name].get("bars", []):
            print(f"{name}: {bar['bar']}: {verdicts[bar['met']]}")


def groups(names: list[str], tiny: bool) -> list[list[str]]:
    """Cases by process: those that share a model, and almost all tiny ones, because imports would
    take longest."""
    by_process: dict[tuple, list[str]] = {}
    for name in names:
        case = CASES[name]
        process: tuple = (name,)
        if tiny:
            process = (case.program if case.program in ("trl", "overlap") else "ours",)
        elif case.part == "graphs":
            process = case.process
        by_process.setdefault(process, []).append(name)
    return list(by_process.values())


def measure(
    names: list[str], tiny: bool, path: Path, seconds: float, directory: str
) -> dict[str, dict]:
    """Run cases until the time is up; print and write each result when it comes."""
    results: dict[str, dict] = {}
    until = time.monotonic() + seconds
    unmet = lacking(asked_for())

    def note(name: str, result: dict) -> None:
        result |= {
            "settings": asdict(case_of(name, tiny)),
            "tiny": tiny,
            "code": code(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "packages_lacking": unmet,
        }
        result["bars"] = judged(case_of(name, tiny), result, tiny)
        results[name] = result
        keep(path, {name: result})
        if result["status"] != "cut short" or "reason" in result:
            print(line(name, result, None), flush=True)

    queue = groups(names, tiny)
    while queue:
        able = []
        for name in queue.pop(0):
            reason = why_not(CASES[name])
            if reason is not None:
                note(name, {"status": "skipped", "reason": reason})
            elif until - time.monotonic() < LEAST:
                note(name, {"status": "skipped", "reason": "the time was up; call it again"})
            else:
                able.append(name)
        if not able:
            continue
        for name, result in run(able, directory, tiny, until):
            note(name, result)
        # a case that failed has ended their process
        rest = [name for name in able if name not in results]
        if rest:
            queue.insert(0, rest)
    return results


def place() -> str | None:
    """Directory of the weights: in memory if they fit, else None, for temporary files."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > ROOM:
        return str(memory)
    return None


@cache
def gpus() -> list[str]:
    """Names of the CUDA GPUs, read in another process, so that this one takes none of their
    memory."""
    names = "print(*map(torch.cuda.get_device_name, range(torch.cuda.device_count())), sep='\\n')"
    command = [sys.executable, "-c", f"import torch; {names}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), metavar="CASE", help="in place of parts"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too")
    parser.add_argument("--again", action="store_true", help="run also what was done before")
    parser.add_argument("--seconds", type=float, default=570, help="time limit of all cases")
    parser.add_argument("--results", type=Path, help=f"by default {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    began = time.monotonic()
    args.cases = args.cases or [
        name for part in args.parts for name, case in CASES.items() if case.part == part
    ]
    if not args.tiny:
        if not gpus():
            parser.exit(
                2, "There is no CUDA GPU (or no torch); `--tiny` runs tiny models on a CPU.\n"
            )
        provide(os.environ.get("WHEELS"))
    path = args.results or (TINY_RESULTS if args.tiny else RESULTS)
    of_today: dict[str, dict] = {}
    if not args.again:
        of_today = {
            name: result
            for name, result in read(path).items()
            if name in args.cases and is_of_today(name, result, args.tiny)
        }
    earlier = {name: x for name, x in of_today.items() if x["status"] == "done"}
    if earlier:
        print(f"done before: {', '.join(earlier)}")
    # those that failed before come after those that were not run yet
    names = [name for name in args.cases if name not in earlier]
    names.sort(key=lambda name: name in of_today)
    with tempfile.TemporaryDirectory(dir=None if args.tiny else place()) as directory:
        seconds = args.seconds - (time.monotonic() - began)
        results = measure(names, args.tiny, path, seconds, directory)
    show(args.cases, earlier | results)
    print(f"\nwritten: {path}")
    sys.exit(any(result["status"] in ("failed", "cut short") for result in results.values()))


if __name__ == "__main__":
    main()
