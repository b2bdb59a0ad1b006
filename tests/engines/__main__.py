"""Runs the scenarios of real engines; see scripts/test-engines."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from tests.engines import (
    default_scenarios,
    sglang_scenarios,
    vllm_own_tests,
    vllm_request_scenarios,
    vllm_scenarios,
    vllm_tier_scenarios,
    vllm_trace_scenario,
)
from tests.engines.quick import reuse_and_kill
from tests.engines.replica_process import transfer_config
from tests.engines.scenario import Outcome, Workshop
from tests.engines.sglang_process import LONG_MS, storage
from tests.engines.sglang_workshop import LONG, SglangWorkshop
from tests.engines.stored import address

ENGINES = {
    "vllm": (
        Workshop,
        (
            vllm_own_tests.vllm_own_tests,
            vllm_trace_scenario.traced,
            *vllm_scenarios.SCENARIOS,
            *vllm_tier_scenarios.SCENARIOS,
            *vllm_request_scenarios.SCENARIOS,
            default_scenarios.reuse_by_default,
            default_scenarios.tier_reuse_by_default,
        ),
    ),
    "sglang": (
        SglangWorkshop,
        sglang_scenarios.SCENARIOS,
    ),
}
QUICK: dict[str, Callable[[Any], Outcome]] = {
    "vllm": partial(
        reuse_and_kill,
        engine="vllm",
        through=lambda store: {
            "transfer": transfer_config(address(store), lookup_deadline_ms=LONG_MS, load_deadline_ms=LONG_MS)
        },
    ),
    "sglang": partial(reuse_and_kill, engine="sglang", through=lambda store: storage(address(store), **LONG)),
}


def main() -> int:
    """Run all scenarios, or those named; 1 if one did not go as it must."""
    parser = argparse.ArgumentParser(prog="scripts/test-engines", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="names of scenarios; all by default")
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm", help="vllm by default")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of lines")
    parser.add_argument("--keep", type=Path, help="folder for models and logs, kept")
    parser.add_argument("--quick", action="store_true", help="run one short scenario instead")
    given = parser.parse_args()
    # So that engines and stores are ended too when this process is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    make_shop, scenarios = ENGINES[given.engine]
    if given.quick:
        scenarios = (update_wrapper(QUICK[given.engine], reuse_and_kill),)
    names = [scenario.__name__ for scenario in scenarios]
    unknown = set(given.scenarios) - set(names)
    if unknown:
        parser.error(f"no scenario {sorted(unknown)[0]!r} of {given.engine}, there are {', '.join(names)}")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-engines-") as made:
        folder = given.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        shop = make_shop(folder)
        for scenario in scenarios:
            if given.scenarios and scenario.__name__ not in given.scenarios:
                continue
            started_s = time.monotonic()
            try:
                outcome = scenario(shop)
            except Exception as error:
                outcome = Outcome(
                    given.engine, scenario.__name__, outputs_equal=False, problems=[repr(error)]
                )
            outcome.notes["scenario_s"] = round(time.monotonic() - started_s, 1)
            outcomes.append(outcome)
            _tell(outcome)
    if given.json:
        print(json.dumps([outcome.as_dict() for outcome in outcomes], indent=1))  # noqa: T201  # its output
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def _tell(outcome: Outcome) -> None:
    state = "ok" if not outcome.problems else f"FAILED: {'; '.join(outcome.problems)}"
    print(  # noqa: T201  # its output
        f"{outcome.engine} {outcome.scenario}: outputs_equal={outcome.outputs_equal} "
        f"external_tokens={outcome.external_tokens:.0f} seconds={outcome.seconds:.2f} "
        f"({outcome.notes.get('scenario_s')} s in all) {state}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
