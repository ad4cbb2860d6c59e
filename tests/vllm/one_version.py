"""What each supported vLLM must do: ``PYTHONPATH=FOLDER python -m tests.vllm.one_version MODEL STORE VERSION``.

The same steps on every release: loads are asynchronous and bitwise equal to vLLM's own prefix hit, a load that fails
is computed again, an abort and a reset leave nothing behind.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from tests.vllm.engine import ENVIRONMENT, Engine, prompt
from tests.vllm.faults import Faults


def main(model: str, folder: str, version: str) -> None:
    os.environ.update(ENVIRONMENT)
    faulthandler.dump_traceback_later(270, exit=True)  # tells where it hangs
    import vllm

    from tests.vllm.models import dtype

    assert vllm.__version__ == version, f"vLLM {vllm.__version__} was imported from {vllm.__file__}"
    faults = Faults(Path(folder, "faults.json"))
    store = faults.url(f"file://{folder}/store")
    engine = Engine(Path(model), {"store": store, "failed_key_ttl_s": 0}, dtype=dtype(Path(model)))
    tokens = prompt(1000, seed=1)
    cold = engine.run(tokens)
    local = engine.run(tokens)
    assert local.cached > 700, "vLLM's own prefix cache did not serve it"
    engine.forget()
    before = engine.counters["loaded_chunks"]
    loaded = engine.run(tokens)
    assert engine.counters["loaded_chunks"] > before, "nothing was loaded"
    assert loaded.like(local)
    engine.assert_at_rest()

    engine.forget()
    with faults(kind="absent", op="get"):
        assert engine.run(tokens).near(cold)
    assert engine.counters["load_missing_chunks"] > 0, "no load has failed"
    engine.assert_at_rest()

    engine.forget()
    with faults(kind="delay", op="get", seconds=0.2):
        name = engine.add(tokens)
        while not engine.connector.outstanding()["loads"]:
            engine.step()
        engine.abort(name)
        engine.assert_at_rest()

    assert engine.llm.reset_prefix_cache(reset_connector=True)
    before = engine.counters["lookup_hits"]
    assert engine.run(tokens).near(cold)
    assert engine.counters["lookup_hits"] == before, "a hit from before the reset"
    engine.assert_at_rest()
    engine.close()
    print("PASSED", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
