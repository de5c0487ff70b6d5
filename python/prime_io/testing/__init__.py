"""Try a run without GPU, model or torch: a load whose every byte is known, a trainer that checks it, a fast clock.

    load = FakeLoad(store=store, shape=PRESETS["kimi-k2"])
    dispatcher = Dispatcher(source=source, run_episode=load, ...)
    trainer = FakeTrainer(run_dir, load=load)
    run_virtual(main())

What a trace holds follows from its id alone. So whoever reads it, in whatever process and after however many
resumes, can tell whether every byte belongs to that trace.
"""

from .clock import VirtualTimeLoop, run_virtual
from .load import FIELD, PRESETS, FakeLoad, Plan, Shape, WrongBytesError
from .trainer import FakeTrainer

__all__ = [
    "FIELD",
    "PRESETS",
    "FakeLoad",
    "FakeTrainer",
    "Plan",
    "Shape",
    "VirtualTimeLoop",
    "WrongBytesError",
    "run_virtual",
]
