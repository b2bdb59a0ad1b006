"""Starting traces: spans go out if the OTEL_ variables ask for it and OpenTelemetry's SDK is there."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from kvstore.config import TraceSettings

if TYPE_CHECKING:
    from kvstore.trace_export import TraceCounters

logger = logging.getLogger(__name__)


@contextmanager
def tracing(settings: TraceSettings | None, *, service: str) -> Iterator["TraceCounters | None"]:
    """Have this process traced inside the block, under the name ``service``; yields what counts its spans.

    None where nothing asks for it. Traces are no reason not to start: what is missing for them is warned of.
    """
    with ExitStack() as stack:
        yield None if settings is None else _start(settings, service, stack)


def _start(settings: TraceSettings, service: str, stack: ExitStack) -> "TraceCounters | None":
    if settings.protocol != "http/protobuf":
        logger.warning(
            "traces: off: OTEL_EXPORTER_OTLP_PROTOCOL is %s, only http/protobuf is spoken", settings.protocol
        )
        return None
    try:
        # Only a process that is traced needs the SDK.
        from kvstore.trace_export import exporting

        return stack.enter_context(exporting(service=service, queue_spans=settings.queue_spans))
    except ModuleNotFoundError as error:
        logger.warning("traces: off: %s is missing: pip install 'tiered-kvstore[tracing]'", error.name)
    except Exception:  # whatever the SDK makes of its variables
        logger.exception("traces: off: the OTEL_ variables cannot be used")
    return None
