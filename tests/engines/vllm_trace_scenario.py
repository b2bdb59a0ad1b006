"""The scenario of traces: what the connector does for a request lies below the span that its caller names."""

from tests.engines.replica_process import PATIENT, transfer_config
from tests.engines.scenario import Outcome, Workshop, batches
from tests.engines.stored import address, await_blocks
from tests.engines.vllm_server import ServerProcess
from tests.tracing.collector import Collector

ENGINE = "vllm"
_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_WANTED = ("kvstore/MatchAndLease", "kvstore/Commit")
_LOADS = {"kvstore/Peek", "kvstore/Fetch"}


def traced(shop: Workshop) -> Outcome:
    """The OpenAI-style server with a collector: a request with a traceparent, and one without."""
    outcome = Outcome(ENGINE, "traced")
    prompt = batches(1)[0][0]
    with Collector() as collector, shop.store("traced") as store:
        environ = collector.environ | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        transfer = transfer_config(address(store), **PATIENT)
        with ServerProcess(
            shop.model(),
            shop.log("traced"),
            transfer,
            "--otlp-traces-endpoint",
            f"http://127.0.0.1:{collector.port}/v1/traces",
            environ=environ,
        ) as process:
            process.complete([*reversed(prompt)])
            for _ in range(2):
                process.complete(prompt, headers={"traceparent": f"00-{_TRACE}-{_SPAN}-01"})
                await_blocks(store, 18)
                process.reset()
            collector.wait_for(*_WANTED)
        spans = [span for span in collector.spans() if span.name.startswith("kvstore/")]
    outcome.notes["spans"] = sorted({span.name for span in spans})
    outcome.demand(bool({span.name for span in spans} & _LOADS), f"spans of {outcome.notes['spans']} only")
    elsewhere = [span.name for span in spans if (span.trace, span.parent) != (_TRACE, _SPAN)]
    outcome.demand(not elsewhere, f"not below the caller's span: {elsewhere}")
    return outcome
