"""That the benchmarks run: what they measure on this machine is not looked at."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMOKE = ["0.5B bf16", "7B NF4, NF4 reward", "7B NF4, reward adapter"]
DONE = {"seconds": [2.0], "median_s": 2.0, "peak_gb": {"allocated": 10.0, "reserved": 11.0}, "phases_s": {}}


@pytest.fixture(scope="module")
def load():
    """Import a benchmark by name; they stand in no package."""
    places = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    sys.path[1:1] = places
    yield importlib.import_module
    for place in places:
        sys.path.remove(place)


@pytest.fixture
def gpu(load):
    return load("gpu")


def done(peak=10.0, estimate=10.0, status="done", device="some GPU", **more):
    told = {"estimate": {"peak_gb": estimate, "ratio": estimate / peak}, "hardware": {"device": device}}
    return DONE | told | {"status": status, "peak_gb": {"allocated": peak, "reserved": 11.0}} | more


def main_of(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    return module.main()


# ---- gpu.sh ----


@pytest.mark.slow
def test_the_gpu_benchmark_runs_tiny_models_on_whatever_is_there(tmp_path, monkeypatch):
    path = tmp_path / "results" / "gpu.json"
    monkeypatch.setenv("PYTHON", sys.executable)
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "--smoke", "--results", str(path), "--cases", *SMOKE]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    results = json.loads(path.read_text())["results"]
    assert sorted(results) == sorted(SMOKE)
    for result in results.values():
        assert result["status"] == "done" and result["smoke"]
        assert {"torch", "transformers", "bitsandbytes"} <= result["versions"].keys() and result["hardware"]["device"]
        assert result["median_s"] > 0 and len(result["seconds"]) == result["settings"]["steps"]
        assert result["completion_length"] == result["settings"]["response"]
        assert {*result["phases_s"]} == {"generate", "score", "forward", "update"}
        assert result["peak_gb"]["allocated"] == max(result["peak_gb"]["by_phase"].values()) > 0
        assert result["estimate"]["peak_gb"] == max(result["estimate"]["by_phase"].values())
        assert all(bar["met"] is None for bar in result["bars"])
        assert result["estimate"]["ratio"] == pytest.approx(1, abs=0.2)
    settings = [results[name]["settings"] for name in SMOKE]
    assert [(x["base"], x["reward"]) for x in settings] == [("bf16", "bf16"), ("nf4", "nf4"), ("nf4", "adapter")]
    assert "not judged" in process.stdout


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_all_that_a_model_needs(load, monkeypatch, tmp_path, tied):
    case, estimate = load("gpu_case"), load("estimate")
    monkeypatch.setitem(estimate.MODELS, "a", (64, 128, 2, 4, 2, 512, tied))
    case.save_models("a", tmp_path)
    for auto, kind in ((AutoModelForCausalLM, "base"), (AutoModelForSequenceClassification, "classifier")):
        loaded, told = auto.from_pretrained(tmp_path / kind, output_loading_info=True)
        assert not any(told.values())
        assert loaded.config.tie_word_embeddings is tied
        assert 0.01 < loaded.get_input_embeddings().weight.float().std() < 0.03
    made = (tmp_path / "base" / "config.json").stat().st_mtime_ns
    case.save_models("a", tmp_path)  # they are there
    assert (tmp_path / "base" / "config.json").stat().st_mtime_ns == made


def test_cases_with_a_bar_are_estimated_to_meet_it(load, gpu, tmp_path):
    """Of a 7B model, from its sizes: whether a GPU agrees is what the benchmark is for."""
    case, estimate = load("gpu_case"), load("estimate")
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    barred = [x for x in gpu.CASES.values() if x.bar is not None]
    assert [(x.reward, x.bar, x.base, x.response) for x in barred] == [
        ("nf4", 16, "nf4", 512),
        ("adapter", 10.5, "nf4", 512),
    ]
    for x in barred:
        folder = tmp_path / x.shape
        estimate.config_of(x.shape).save_pretrained(folder / "base")
        estimate.config_of(x.shape, num_labels=1).save_pretrained(folder / "classifier")
        LoraConfig(**case.LORA | {"target_modules": list(kinds)}).save_pretrained(folder / "adapter")
        assert 0.6 * x.bar < case.estimated(x, folder, "cuda")["peak_gb"] < x.bar


def test_peaks_of_a_gpu_are_the_allocator_s_by_phase(load, monkeypatch):
    """With a stand-in for the allocator."""
    case, now = load("gpu_case"), {"allocated": 0, "reserved": 0}
    names = {"max_memory_allocated": lambda: now["allocated"], "max_memory_reserved": lambda: now["reserved"]}
    names |= {
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: now.update(allocated=1, reserved=1),
    }
    for name, function in names.items():
        monkeypatch.setattr(case.torch.cuda, name, function)
    monkeypatch.setattr(case, "GPU", True)
    of_run = {"load": 5e9, "generate": 7e9, "forward": 6e9, "score": 8e9, "update": 9e9}
    log = {"tokens_per_second": 3.0, "completions/mean_length": 8.0} | {f"time/{x}": 1.0 for x in case.PHASES}
    with case.tracker_of_device() as tracker:
        for phase, peak in of_run.items():
            tracker.enter(phase) if phase != "load" else None
            now.update(allocated=peak, reserved=2 * peak if phase == "score" else 0)
        told = case.measured([9.0, 2.0, 4.0], [log, log, log], case.CASES["0.5B bf16"], tracker)
    assert told["peak_gb"] == {"allocated": 9, "reserved": 16, "by_phase": {x: y / 1e9 for x, y in of_run.items()}}
    assert told["seconds"] == [2, 4] and told["median_s"] == 3  # without the step of warm-up
    assert case.measured([9.0], [log], case.CASES["0.5B bf16"], tracker)["median_s"] is None


@pytest.mark.parametrize(
    ("result", "met"),
    [
        (done(peak=9.9, estimate=9.0), [True, True]),
        (done(peak=10.6, estimate=9.0), [False, False]),
        (done(device="cpu"), [None, None]),
        (done(status="cut short"), [None, None]),
        ({"status": "skipped", "reason": "no"}, []),
    ],
)
def test_bars(gpu, result, met):
    case = gpu.Case("Qwen2.5-7B", bar=10)
    assert [bar["met"] for bar in gpu.judged(case, result, smoke=False)] == met
    assert {bar["met"] for bar in gpu.judged(case, result, smoke=True)} <= {None}
    assert len(gpu.judged(replace(case, bar=None), result, smoke=False)) == len(met) // 2


def test_a_case_that_fails_is_told_and_the_others_go_on(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    said = gpu.MARK + json.dumps(["0.5B bf16", done(status="cut short")])
    (tmp_path / "gpu_case.py").write_text(
        "import sys, time\n"
        f"if '0.5B bf16' in sys.argv: print({said!r}, flush=True); time.sleep(60)\n"
        "if '1.5B bf16' in sys.argv: sys.exit('out of memory')\n"
        f"print({gpu.MARK!r} + {json.dumps(['7B bf16', done()])!r})\n"
    )
    monkeypatch.setitem(gpu.CASES, "0.5B bf16", replace(gpu.CASES["0.5B bf16"], limit=1))
    names, path = ["0.5B bf16", "1.5B bf16", "7B bf16"], tmp_path / "gpu.json"
    results = gpu.measure(names, False, path, 100, str(tmp_path))
    assert [results[name]["status"] for name in names] == ["cut short", "failed", "done"]
    assert results["0.5B bf16"]["median_s"] == 2 and "more than 1 s" in results["0.5B bf16"]["reason"]
    assert results["1.5B bf16"]["reason"] == "exit status 1" and "out of memory" in results["1.5B bf16"]["errors"]
    assert json.loads(path.read_text())["results"] == json.loads(json.dumps(results))
    gpu.show(names, results)
    assert "out of memory" in capsys.readouterr().out
    later = gpu.measure(names, False, path, 0, str(tmp_path))  # no time for any
    assert {x["status"] for x in later.values()} == {"skipped"}
    assert json.loads(path.read_text())["results"]["7B bf16"]["status"] == "done"  # what was measured stays


def test_what_is_not_there_is_told(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "ENVIRONMENTS", gpu.ROOT / "no-such-folder")
    name = f"0.5B bf16, TRL {gpu.TRL}"
    found = gpu.measure([name], False, tmp_path / "gpu.json", 100, str(tmp_path))
    assert found[name]["status"] == "skipped" and gpu.TRL in found[name]["reason"]
    missing = {"bitsandbytes"}
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name in missing else object())
    assert gpu.why_not(gpu.CASES["7B bf16"]) is None
    assert gpu.why_not(gpu.CASES["7B NF4, NF4 reward"]) == "not installed: bitsandbytes"


def test_missing_packages_and_what_they_need_are_installed_one_by_one(gpu, monkeypatch, tmp_path):
    available = {"datasets": ("5.0", ["dill>=0.3", "torch>=99", "extra-only; extra == 'x'"]), "dill": ("0.4", [])}
    installed = {"transformers": ("5.17.0", []), "trl": ("1.16", ["transformers>=5", "datasets>=4.7"])}
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        name = gpu.name_of(command[-1])
        if name in available:
            installed[name] = available[name]
        return SimpleNamespace(returncode=int(name not in available), stderr="nothing found")

    def there(name):
        return SimpleNamespace(version=installed[name][0], requires=installed[name][1]) if name in installed else None

    monkeypatch.setattr(gpu, "asked_for", lambda: ["", "torch>=99", "transformers>=5.19,<6", "trl>=1.13"])
    monkeypatch.setattr(gpu, "there", there)
    monkeypatch.setattr(gpu, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "path", [*sys.path])
    gpu.provide("wheels")
    asked = [command[-1] for command in calls]
    assert sorted(asked) == ["datasets>=4.7", "dill>=0.3", "transformers<6,>=5,>=5.19", "trl==1.12.0"]
    assert asked.index("datasets>=4.7") < asked.index("dill>=0.3")
    assert all({"--no-index", "--no-deps", "wheels"} <= {*command} for command in calls)
    assert str(tmp_path / "gpu") in sys.path
    calls.clear()
    gpu.provide(None)  # from the index, what is tested
    assert "--constraint" in calls[0] and not any("--no-index" in command for command in calls)


def test_without_a_gpu_only_tiny_models_run(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    monkeypatch.setattr(gpu, "provide", None)  # nothing is installed either
    with pytest.raises(SystemExit) as stopped:
        main_of(gpu, monkeypatch)
    assert stopped.value.code == 2 and "--smoke" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main_of(gpu, monkeypatch, "--cases", "70B")
    assert stopped.value.code == 2 and "70B" in capsys.readouterr().err


# ---- the others: what they are told to run, with a stand-in for what takes minutes ----


def worker(calls):
    told = {"seconds": [1.0, 2.0], "median": 1.5, "peak_mib": 3.0, "phases": {"generate": 1.0}}

    def run(command, **kwargs):
        calls.append(command)
        return SimpleNamespace(returncode=0, stdout="noise\n" + json.dumps(told), stderr="")

    return run


def test_step_runs_what_it_is_told(load, monkeypatch, tmp_path, capsys):
    step, calls = load("step"), []
    monkeypatch.setattr(step, "subprocess", SimpleNamespace(run=worker(calls)))
    given = ("--shapes", "tiny", "--dtypes", "fp32", "--rounds", 2, "--steps", 3, "--programs", step.OURS)
    main_of(step, monkeypatch, *given, "--results", tmp_path / "step.json")
    assert [command[2:] for command in calls] == [["tiny", "fp32", "4"]] * 2
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["results"]["tiny fp32"][step.OURS]["seconds"] == [1, 2, 1, 2] and written["versions"]["torch"]
    with pytest.raises(SystemExit, match="2"):
        main_of(step, monkeypatch, "--programs", "other")
    assert "invalid choice: 'other'" in capsys.readouterr().err


@pytest.mark.parametrize("peer", ["trl", "agilerl"])
def test_an_environment_that_was_not_installed_to_its_end_is_installed_anew(load, monkeypatch, tmp_path, peer):
    step, calls = load("step"), []

    def run(command, **kwargs):
        (tmp_path / peer).mkdir(exist_ok=True)
        calls.append(command)
        if "pip" in command and len(calls) < 3:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(step, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(step, "subprocess", SimpleNamespace(run=run))
    with pytest.raises(subprocess.CalledProcessError):
        step.installed(peer)
    assert not (tmp_path / peer).exists()
    calls += [None] * 3  # from now on it goes well
    step.installed(peer)
    again = len(calls)
    step.installed(peer)
    assert (tmp_path / peer).exists() and len(calls) == again


def test_scaling_runs_what_it_is_told(load, monkeypatch, tmp_path):
    scaling, calls = load("scaling"), []
    monkeypatch.setattr(scaling, "subprocess", SimpleNamespace(run=worker(calls)))
    main_of(scaling, monkeypatch, "--dtype", "fp32", "--steps", 1, "--results", tmp_path / "scaling.json")
    assert {(command[3], command[4]) for command in calls} == {("fp32", "2")}
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert len(rows) == len(calls) == len(scaling.ROWS) and rows[0]["seconds"] == 1.5
    with pytest.raises(SystemExit, match="2"):
        main_of(scaling, monkeypatch, "--steps", "many")


def test_estimate_runs_what_it_is_told(load, monkeypatch, capsys):
    estimate, calls = load("estimate"), []
    phases = dict.fromkeys(("load", *estimate.PHASES), 5.0)
    told = {"measured": {"phases": phases, "resident": 7.0}, "estimated": {"peak": 5.0, "phases": phases}}
    answer = SimpleNamespace(returncode=0, stdout=json.dumps(told), stderr="")
    monkeypatch.setattr(
        estimate, "subprocess", SimpleNamespace(run=lambda command, **kwargs: calls.append(command) or answer)
    )
    before = estimate.RESULTS.read_bytes() if estimate.RESULTS.exists() else None
    estimate.main(["fp32", "bf16"])
    assert [command[-2:] for command in calls] == [["--one", "fp32"], ["--one", "bf16"]]
    assert (estimate.RESULTS.read_bytes() if estimate.RESULTS.exists() else None) == before  # only a whole run writes
    assert capsys.readouterr().out.count("1.000") == 2
