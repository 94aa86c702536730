"""Sampling with vLLM, to which only the policy's adapter travels: the base never moves."""

import gc
import os
import random
import re
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from itertools import count, cycle, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..concurrency import started
from ..config import LOCK, PPOConfig
from ..distributed import on_every_rank
from ..modeling import ActorCritic
from ..modeling.adapters import save_adapter
from ..rewards.scoring import RandomState
from .engine import Ahead, Request, Sampled, VLLMError
from .generator import SAMPLING, Generator, stop_token_ids
from .record import Record
from .turns import Turn, TurnSampler, together

if TYPE_CHECKING:
    from .vllm_server import VLLMServer

# name of an adapter that a server reads, also if half written
VERSION = re.compile(r"[0-9a-f]{12}-\d+(\.tmp)?")
SERVED = ".vllm"  # in the output directory: the adapter that a server reads
CPU_CACHE = 2**28  # bytes of keys and values; vLLM's own default is gigabytes of main memory
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM can reserve slots


class VLLMGenerator(Generator):
    """Samples with the policy's adapter as it is at the start of a rollout, and keeps the
    sampler's log-probs."""

    engine: "ColocatedEngine | VLLMServer"

    def __init__(
        self,
        actor_critic: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        args: PPOConfig,
        accelerator: Accelerator,
    ):
        self.actor_critic = actor_critic
        self.args = args
        self.limit = args.max_completion_length
        stops = stop_token_ids(
            tokenizer,
            actor_critic.policy.generation_config,
            vocab_size=actor_critic.config.get_text_config().vocab_size,
            others=args.stop_token_ids,
        )
        self.stop_token_ids = frozenset(stops)
        settings = {name: x for name in SAMPLING if (x := getattr(args, name)) is not None}
        # the model's own EOS is among them
        settings |= {"stop_token_ids": stops, "ignore_eos": True, "logprobs": 0}
        base = served_base(actor_critic, args)
        revision = served_revision(actor_critic, args)
        rank = reserved_rank(actor_critic)
        if args.vllm_mode == "server":
            from .vllm_server import VLLMServer  # with its HTTP client

            # all ranks sample with one adapter, which the first one writes
            run = [random.SystemRandom().randbytes(6).hex()]
            broadcast_object_list(run)
            self.folder = Path(args.output_dir, SERVED).absolute()
            self.writes = accelerator.is_main_process
            url = args.vllm_server_base_url or "http://127.0.0.1:8000"
            self.engine = VLLMServer(
                url,
                args.vllm_server_timeout,
                base,
                settings,
                rank,
                revision=revision,
                concurrency=args.vllm_options.concurrency,
            )
            on_every_rank(self._forget_last_run, OSError, VLLMError, runs=self.writes)
        else:
            run = ["policy"]
            self.writes = True
            in_memory = Path("/dev/shm")
            self.folder = Path(
                tempfile.mkdtemp(dir=in_memory if os.access(in_memory, os.W_OK) else None)
            )
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            self.engine = ColocatedEngine(
                base, revision, actor_critic.dtype, rank, args, accelerator, settings
            )
        self.versions = (f"{run[0]}-{number}" for number in count(1))
        self.version: str | None = None
        self.served: dict[str, Tensor] | None = None  # weights of the version
        with self.awake():  # an adapter that vLLM refuses ends the run now
            pass

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Sample from the policy of this moment within a context."""
        try:
            self.engine.wake()
            # an adapter that has not moved, e.g. since an evaluation, is still there
            served = self.served
            parameters = self.actor_critic.policy_parameters()
            weights = {name: x.detach().to("cpu", copy=True) for name, x in parameters.items()}
            if served is None or any(not x.equal(served[name]) for name, x in weights.items()):
                self._load(weights)
            yield
        finally:
            self.engine.sleep()

    def _load(self, weights: dict[str, Tensor]) -> None:
        # 1. Write the adapter beside, then rename: a server never reads half of it.
        version = next(self.versions)
        last = self.version
        on_every_rank(partial(self._write, version, weights), OSError, ValueError, runs=self.writes)
        # 2. Load it on every rank, unless a server has it; its name is new, since vLLM caches
        # prompts by name.
        on_every_rank(partial(self.engine.load, version, self.folder / version), VLLMError)
        self.version = version
        self.served = weights
        # 3. Forget the one before: every rank has sampled its rollout.
        if last is not None:
            on_every_rank(partial(self._forget, last), OSError, VLLMError, runs=self.writes)

    def _write(self, version: str, weights: dict[str, Tensor]) -> None:
        policy = self.actor_critic.policy
        name = self.actor_critic.policy_adapter
        aside = self.folder / f"{version}.tmp"
        try:
            save_adapter(policy, name, str(aside), weights)
            aside.rename(self.folder / version)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(
                f"The adapter cannot be written to `{self.folder}` for vLLM ({error}); free space, "
                "and resume the run."
            ) from error

    def _forget(self, version: str) -> None:
        self.engine.unload(version)
        shutil.rmtree(self.folder / version, ignore_errors=True)

    def _forget_last_run(self) -> None:
        """Unload what an earlier run in this directory has left, e.g. because it was killed."""
        left = [path.name for path in self.folder.glob("*") if VERSION.fullmatch(path.name)]
        if left:
            # not while that run trains, nor on a disk that cannot be locked
            with (
                suppress(OSError, NotImplementedError),
                FileLock(self.folder.parent / LOCK, timeout=0),
            ):
                for version in left:
                    self._forget(version)

    def generate(self, prompts: list[list[int]], rooms: list[int] | None = None) -> list[list[int]]:
        """Sample a completion for each prompt, of at most so many tokens."""
        requests = self._requests(prompts, rooms)
        return self._completions(prompts, self.engine.sample(str(self.version), requests))

    def turn_sampler(self) -> TurnSampler:
        """Turns of the episodes of a rollout: from a server, each by itself."""
        if self.args.vllm_mode == "server":
            self.engine.settings["temperature"] = self.temperature
            return RequestingSampler(cast("VLLMServer", self.engine), str(self.version))
        return super().turn_sampler()

    def _requests(self, prompts: list[list[int]], rooms: list[int] | None = None) -> list[Request]:
        copies = Counter(map(tuple, prompts))
        pairs = zip(map(tuple, prompts), rooms or repeat(self.limit))
        room = dict(sorted(pairs, key=lambda pair: pair[1]))  # the largest, if there are several
        # completions depend on no other request, and a resumed run repeats them
        seeds = torch.randint(2**31, (len(copies),)).tolist()
        self.engine.settings["temperature"] = self.temperature
        if not self.temperature:  # vLLM refuses several greedy ones, which are equal
            copies = Counter(list(copies))
        return [Request(list(x), n, seed, room[x]) for (x, n), seed in zip(copies.items(), seeds)]

    def _completions(
        self, prompts: list[list[int]], sampled: list[list[Sampled]]
    ) -> list[list[int]]:
        by_prompt = dict(zip(dict.fromkeys(map(tuple, prompts)), map(cycle, sampled)))
        completions = [next(by_prompt[tuple(prompt)]) for prompt in prompts]
        self.sampled_logprobs = [completion.logprobs for completion in completions]
        return [completion.ids for completion in completions]


class RequestingSampler(TurnSampler):
    """Requests each turn from a server as soon as its episode is ready."""

    def __init__(self, server: "VLLMServer", version: str):
        self.server = server
        self.version = version
        # one number of the run's stream, whatever the episodes do
        self.seed = int(torch.randint(2**31, ()))

    def play(
        self,
        episodes: Sequence[Coroutine[Any, Any, None]],
        record: Record,
        guard: Callable[[int], AbstractContextManager],
    ) -> None:
        """Run episodes in an event loop to their ends."""
        with guard(0):
            playing = started(self._play(episodes), waits=True)
            try:
                playing.result()
            finally:
                playing.cancel()

    async def _play(self, episodes: Sequence[Coroutine[Any, Any, None]]) -> None:
        async with self.server.requesting(self.version) as self.complete:
            await together(episodes)

    async def sample(self, row: int, number: int, ids: list[int], room: int) -> Turn:
        """Request a turn with a seed of its own: it depends on no other request, and a resumed run
        repeats it."""
        seed = hash((self.seed, row, number)) % 2**31
        [completion] = await self.complete(Request(ids, 1, seed, room))
        return Turn(completion.ids, completion.logprobs)


class OverlappingGenerator(VLLMGenerator):
    """Samples the next rollout on a server while the trainer learns from this one."""

    def begin(self, prompts: list[list[int]]) -> None:
        """Request the completions of the next rollout, from the policy of this moment."""
        self.evaluates = False
        with super().awake():
            wait = cast("VLLMServer", self.engine).start(str(self.version), self._requests(prompts))
            self.ahead = Ahead(prompts, wait)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wait for a rollout that was begun; otherwise sample from the policy of this moment."""
        if self.ahead is not None:  # an evaluation, too, would unload its adapter
            on_every_rank(self.ahead.wait, VLLMError)
        with super().awake() if self.evaluates or self.ahead is None else nullcontext():
            yield

    def generate(self, prompts: list[list[int]], rooms: list[int] | None = None) -> list[list[int]]:
        """Completions of a rollout that was begun, or new ones."""
        ahead = self.ahead
        if self.evaluates or ahead is None:
            return super().generate(prompts, rooms)
        self.ahead = None
        if any(gather_object([ahead.prompts != prompts])):  # it was resumed with other prompts
            with super().awake():
                return super().generate(prompts, rooms)
        return self._completions(prompts, ahead.wait())


def served_base(actor_critic: ActorCritic, args: PPOConfig) -> str:
    """Name or path of the base that vLLM serves, which must have the weights of the policy's."""
    config = actor_critic.policy.get_base_model().config
    path = args.vllm_options.base_model
    base = path or config._name_or_path
    is_quantized = getattr(config, "quantization_config", None) is not None
    if path is None and is_quantized and "quantization" not in (args.generation_kwargs or {}):
        raise ValueError(
            f"The policy's base is quantized, and vLLM would serve `{base}` unquantized: another "
            "policy (0.25 nats off per token with NF4). Set `vllm_kwargs={'base_model': ...}` "
            "to weights that `recipes/dequantize.py` of the repository wrote, or "
            "`generation_kwargs={'quantization': 'bitsandbytes'}` if vLLM has its plugin."
        )
    if not base:
        raise ValueError(
            "`model` has no name or path that vLLM could load; save it, or set "
            "`vllm_kwargs={'base_model': ...}`."
        )
    return base


def served_revision(actor_critic: ActorCritic, args: PPOConfig) -> str | None:
    """Commit of the Hub that the policy's base was loaded from, if vLLM loads it from there, too."""
    if args.vllm_options.base_model is not None:
        return None
    return getattr(actor_critic.policy.get_base_model().config, "_commit_hash", None)


def reserved_rank(actor_critic: ActorCritic) -> int:
    """Rank of the slot that an engine reserves for the policy's adapter, if vLLM can sample with
    it at all."""
    policy = actor_critic.policy
    config = policy.peft_config[actor_critic.policy_adapter]
    base = policy.get_base_model()
    # vLLM raises for other unsupported kinds when it loads them; these would be ignored
    embeddings = (base.get_input_embeddings(), base.get_output_embeddings())
    if not isinstance(config, LoraConfig) or any(isinstance(x, BaseTunerLayer) for x in embeddings):
        raise ValueError(
            "`generation_backend='vllm'` samples with LoRA on linear layers inside the model, not "
            "with other adapters or one on the embeddings; change `peft_config`, or use "
            "'transformers'."
        )
    largest = max([config.r] + list(config.rank_pattern.values()))
    return next((rank for rank in RANKS if rank >= largest), RANKS[-1])


@contextmanager
def contained(device: torch.device) -> Iterator[None]:
    """Undo what the construction of an engine does to the process: seeds, environment, threads,
    garbage collection."""
    random_state = RandomState.capture(device)
    environment = dict(os.environ)
    set_num_threads = torch.set_num_threads
    os.environ |= {
        # the engine in this process: nothing is left when it ends
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads, too, would be bound
    } | environment
    try:
        yield
    finally:
        random_state.restore()
        torch.set_num_threads = set_num_threads
        # it was frozen with all that there is, and would not free a trainer that is dropped
        gc.unfreeze()
        os.environ.clear()
        os.environ.update(environment)


class ColocatedEngine:
    """vLLM in this process, with a copy of the base."""

    def __init__(
        self,
        base: str,
        revision: str | None,
        dtype: torch.dtype,
        rank: int,
        args: PPOConfig,
        accelerator: Accelerator,
        settings: dict,
    ):
        if find_spec("vllm") is None:
            raise ImportError(
                "`generation_backend='vllm'` needs vLLM, which is not installed; install it in a "
                "new environment (see docs/generation.md), or set `vllm_mode='server'`, whose "
                "server may be elsewhere."
            )
        sleeps = args.vllm_enable_sleep_mode
        defaults: dict[str, Any] = {
            "revision": revision,
            "dtype": str(dtype).removeprefix("torch."),
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
            "max_model_len": args.vllm_max_model_length or -1,  # the model's context, or what fits
            "trust_remote_code": args.trust_remote_code,
            "enable_sleep_mode": sleeps,
        }
        if accelerator.device.type == "cpu":
            # vLLM 0.32 dies when it samples part of a prompt with a seed, on CPUs only
            defaults |= {
                "kv_cache_memory_bytes": CPU_CACHE,
                "enforce_eager": True,
                "enable_chunked_prefill": False,
            }
        if accelerator.num_processes > 1:  # vLLM then uses the process group of the run
            defaults["distributed_executor_backend"] = "external_launcher"
        with contained(accelerator.device):
            import vllm
            from vllm.lora.request import LoRARequest

            if sleeps and not hasattr(vllm.LLM, "release_kv_cache_memory"):
                raise ImportError(
                    f"`vllm_enable_sleep_mode` needs vLLM 0.31, got {vllm.__version__}; update it."
                )
            self.llm = vllm.LLM(
                base,
                **defaults | cast(dict, args.generation_kwargs or {}),
                enable_lora=True,
                max_loras=1,
                max_lora_rank=rank,
                skip_tokenizer_init=True,
                generation_config="vllm",  # that of the model would change the sampling
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled
                seed=args.seed,
            )
        # its end would destroy the process group, which is that of the run or of the next engine
        if finalizer := getattr(self.llm.llm_engine.engine_core, "_finalizer", None):
            finalizer.detach()
        self.params = partial(vllm.SamplingParams, detokenize=False)
        self.adapter = LoRARequest
        self.settings = settings
        self.sleeps = sleeps
        self.requests = dict[str, Any]()
        self.device = accelerator.device

    def wake(self) -> None:
        """Allocate what `sleep` freed."""
        if self.sleeps and self.requests:
            torch.cuda.empty_cache()  # what the update no longer uses
            self.llm.wake_up()

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter into memory; its directory is not needed afterwards."""
        request = self.adapter(name, int(name.rpartition("-")[2]), str(directory))
        try:
            self.llm.llm_engine.add_lora(request)
        except (ValueError, RuntimeError) as error:
            raise VLLMError(
                f"vLLM does not support this adapter: {error}; change `peft_config`."
            ) from error
        self.requests = {name: request}
        shutil.rmtree(directory)

    def unload(self, name: str) -> None:
        """Do nothing: the next adapter takes the slot."""

    def sample(self, name: str, requests: Sequence[Request]) -> list[list[Sampled]]:
        """Sample the completions of each request."""
        params = [
            self.params(n=x.copies, seed=x.seed, max_tokens=x.max_tokens, **self.settings)
            for x in requests
        ]
        prompts = [{"prompt_token_ids": x.prompt_ids} for x in requests]
        longest = max((len(x.prompt_ids) + x.max_tokens for x in requests), default=0)
        # vLLM would cut completions in silence
        if longest > (fits := self.llm.llm_engine.model_config.max_model_len):
            raise VLLMError(
                f"vLLM has memory for {fits} tokens of a prompt and its completion, not {longest}; "
                "raise `vllm_gpu_memory_utilization`, or lower `max_completion_length` or "
                "`max_prompt_length`."
            )
        # its sampler for CPUs draws a number per token, despite the seeds
        random_state = RandomState.capture(self.device)
        outputs = self.llm.generate(
            prompts, params, lora_request=self.requests[name], use_tqdm=False
        )
        random_state.restore()
        return [[_sampled(completion) for completion in output.outputs] for output in outputs]

    def sleep(self) -> None:
        """Free keys and values. Base and adapter stay on the GPU."""
        if self.sleeps:
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()


def _sampled(completion: Any) -> Sampled:
    ids = list(completion.token_ids)
    return Sampled(ids, [entry[token].logprob for token, entry in zip(ids, completion.logprobs)])
