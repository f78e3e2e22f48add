"""An engine process with a FakeRunner: `fake_engine.py FD`. The config's model_path says how it loads."""

from __future__ import annotations

import sys
import time

from fakes import FakeRunner, make_info

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError
from quantd.engine.loop import MakeRoom, Progress, serve
from quantd.engine.ranks import Fail
from quantd.quant.errors import CheckpointError


class Clinging(FakeRunner):
    """Freeing it takes for ever, as with a group of GPUs while steps that were recorded with it are there."""

    def __del__(self) -> None:
        time.sleep(600)


def build_runner(config: EngineConfig, progress: Progress, fail: Fail, make_room: MakeRoom) -> FakeRunner:
    for done in (1, 2, 3):
        progress(done, 3)
    match config.model_path:
        case "damaged":
            raise CheckpointError("shard 2 is missing")
        case "too big":
            raise MemoryError
        case "too big for torch":
            import torch

            torch.empty(2**46)
        case "buggy":
            raise ZeroDivisionError("oh")
        case "exits":
            sys.exit(3)
        case "short":
            while (allowance := make_room(CapacityError("7 bytes are wanting", 7))).promised:
                pass
            return FakeRunner(make_info(num_blocks=allowance.limit or 0))
        case "hangs":
            time.sleep(600)
    return Clinging(make_info(num_blocks=4096), step_seconds=float(config.model_path))


if __name__ == "__main__":
    serve(int(sys.argv[1]), build_runner)
