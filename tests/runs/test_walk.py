"""One default iteration runs through few files: what a reader must hold in mind."""

import sys
from pathlib import Path

from runs_of_tiny import trainer

import trl_ppo_ext

PACKAGE = Path(trl_ppo_ext.__file__).parent


# files that are one idea
IDEAS = {
    "the chain from rewards to advantages": {
        "ppo/credit.py",
        "ppo/advantages.py",
        "ppo/baseline.py",
        "ppo/places.py",
    },
    "what samples, from its protocol to a step": {
        "episodes/generator.py",
        "episodes/transformers_generator.py",
        "episodes/static_sampler.py",
        "episodes/static_step.py",
        "episodes/static_memory.py",
    },
}


def test_default_iteration_runs_through_sixteen_ideas(tmp_path):
    """A file is one, or a few are; one of them ends all ranks together when one fails to sample."""
    run = trainer(tmp_path, max_steps=4)
    files = set()
    training_step = run.training_step

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    def traced(*args, **kwargs):
        sys.setprofile(note)
        try:
            return training_step(*args, **kwargs)
        finally:
            sys.setprofile(None)

    run.training_step = traced
    run.train()
    assert {
        "trainer.py",
        "ppo/rollouts.py",
        "ppo/advantages.py",
        "ppo/updates.py",
        "episodes/play.py",
    } <= files
    of_files = {file: idea for idea, its_files in IDEAS.items() for file in its_files}
    ideas = {of_files.get(file, file) for file in files}
    assert len(ideas) <= 16, sorted(ideas)
