"""One store by one command, and another by two parts in turn, of vLLM. Run by the python of vLLM's own environment:

    .venv-vllm/bin/python tests/vllm/run_parts.py WHOLE SHARED KEY=VALUE…

The parts share an engine, which starts once: what differs is what it was asked before.
"""

import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def main(whole, shared, *options):
    from run_engine import spare_numba

    from eagle31_train.cli import load_config
    from eagle31_train.errors import UserError
    from eagle31_train.targets import extraction as stage

    spare_numba()
    engine = stage.make_engine(load_config(list(options)))
    with patch.object(stage, "make_engine", lambda config: engine):
        for part in (0, 1, 0):
            parts = [f"store_dir={shared}", "extract.parts=2", f"extract.part={part}", "store.patience=0.01"]
            with suppress(UserError):  # part 0 finishes the store the second time
                stage.extract(load_config([*options, *parts]))
        stage.extract(load_config([*options, f"store_dir={whole}"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
