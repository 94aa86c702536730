"""`trl-ppo serve-reward MODEL`: score with a sequence classifier over HTTP, for `RemoteReward`.

Nothing heavy is imported before it is needed, so that `--help` is fast.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trl-ppo serve-reward`."""
    parser.add_argument("model", metavar="MODEL", help="id or path of a sequence classifier with one label")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a key")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on; 0 takes a free one")
    parser.add_argument("--quantization", choices=("nf4", "fp4", "int8", "none"), default="nf4", help="of the weights")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="compute dtype; auto is bfloat16 on a GPU that has it, else float32",
    )
    parser.add_argument("--device", default="auto", help="e.g. cuda:0 or cpu; auto is a GPU if there is one")
    parser.add_argument("--batch-size", type=int, default=16, help="completions per forward")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key clients must send")
    parser.add_argument("--max-request-bytes", type=int, default=8 * 2**20, help="longest request that is read")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model run code of its own")


def main(args: argparse.Namespace) -> None:
    """Load the model and serve it until the process is stopped."""
    for name in ("batch_size", "max_request_bytes"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise ValueError(
            "uvicorn and starlette are not installed; run pip install '.[serve]' in the clone that trl_ppo_ext was "
            "installed from, or pip install uvicorn starlette."
        ) from None
    import torch

    from ..rewards import ClassifierReward, load_classifier
    from ..rewards.http import is_loopback, read_key
    from ..rewards.serving import create_app

    if args.api_key_env is not None:
        read_key(args.api_key_env)
    elif not is_loopback(args.host):
        raise ValueError(
            f"--host {args.host} lets other machines in; pass --api-key-env NAME with the variable that holds a key, "
            "or use --host 127.0.0.1."
        )
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    has_bf16 = device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    auto = torch.bfloat16 if has_bf16 else torch.float32
    dtype = auto if args.dtype == "auto" else getattr(torch, args.dtype)
    model = load_classifier(args.model, dtype, args.quantization, device, args.trust_remote_code)
    uvicorn.run(
        create_app(ClassifierReward(model, batch_size=args.batch_size), args.api_key_env, args.max_request_bytes),
        host=args.host,
        port=args.port,
        access_log=False,
        limit_concurrency=64,  # at most this times `--max-request-bytes` is held in memory
        timeout_graceful_shutdown=5,
    )
