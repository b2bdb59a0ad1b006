"""Operations on the store as a whole: health, stats, metrics, and what only an administrator may do."""

from dataclasses import asdict

from aiohttp import web

from kvstore.errors import TimedOut
from kvstore.hottest import TOLD_IN_STATS
from kvstore.http.metrics import METRICS_TYPE, metrics_text
from kvstore.http.service import COMMON_HEADERS, Call, HttpService, json_answer
from kvstore.http.sizes import branches_for
from kvstore.tenant import TenantId, tenant_of

_MAX_LISTED_NAMESPACES = 256
_MAX_CHECK_LINES = 200
_DEFAULT_TIMEOUT_S = 10.0


def health(_service: HttpService) -> web.Response:
    """Say that the process answers."""
    return json_answer({"status": "ok"})


def readiness(service: HttpService) -> web.Response:
    """Say whether requests are answered: the tiers are open, and the server is not about to end."""
    if service.is_draining or not service.is_open:
        status = "draining" if service.is_draining else "starting"
        return json_answer({"status": status}, status=503, headers={"Retry-After": "1"})
    return json_answer({"status": "ready"})


async def stats(call: Call) -> web.StreamResponse:
    """Return counters and occupancy; of branches those that are the caller's to know of."""
    told = call.service.stats()
    if not call.identity.is_operator:
        told["branches"] = branches_for(call, limit=TOLD_IN_STATS)
    return json_answer(told)


async def metrics(call: Call) -> web.StreamResponse:
    """Return counters and occupancy as Prometheus reads them."""
    return web.Response(
        body=metrics_text(call.service.stats()).encode(),
        headers={**COMMON_HEADERS, "Content-Type": METRICS_TYPE},
    )


async def namespaces(call: Call) -> web.StreamResponse:
    """List the namespaces that clients opened; salts are not told."""
    listed = []
    for space in call.service.manager.namespaces()[-_MAX_LISTED_NAMESPACES:]:
        told = asdict(space)
        del told["tenant_salt"]
        told["digest"] = space.digest.hex()
        listed.append(told)
    return json_answer({"namespaces": listed})


async def flush(call: Call) -> web.StreamResponse:
    """Wait until what was put has been written to the tiers below."""
    timeout_s = _DEFAULT_TIMEOUT_S if call.timeout_s is None else call.timeout_s
    work = call.service.manager.flush(timeout_s=timeout_s)
    return json_answer({"flushed": await call.service.late_work.within(work, call.patience_s, "a flush")})


async def check(call: Call) -> web.StreamResponse:
    """Verify the store's invariants and a sample of checksums."""
    manager = call.service.manager
    asked = call.values.integer("sample_blocks")
    sample_blocks = 64 if asked is None else asked
    work = manager.check(sample_blocks=sample_blocks)
    try:
        problems = await call.service.late_work.within(work, call.patience_s, "a check")
        problems += await call.service.records.check(sample_records=sample_blocks)
    except TimedOut as error:
        # The invariants are checked without I/O; it is the sample of checksums that takes time.
        problems = [str(error), *await manager.check(sample_blocks=0)]
    return json_answer({"problems": problems[:_MAX_CHECK_LINES]})


async def epoch(call: Call) -> web.StreamResponse:
    """Make everything that is stored of a model unreachable."""
    work = call.service.manager.advance_epoch(call.values.need_text("model"))
    return json_answer(
        {"epoch": await call.service.late_work.within(work, call.patience_s, "an epoch's end")}
    )


async def policy(call: Call) -> web.StreamResponse:
    """Give tiers or namespaces other policies; blocks and leases stay."""
    before = await call.service.manager.change_policy(call.values.need_text("policy"))
    return json_answer({"before": before})


async def erase(call: Call) -> web.StreamResponse:
    """Destroy the key of a tenant, so that nothing stored for it can be read again."""
    named = call.values.text("tenant_id")
    tenant = tenant_of(call.namespace().tenant_salt) if named is None else TenantId(bytes.fromhex(named))
    work = call.service.manager.erase(tenant)
    report = await call.service.late_work.within(work, call.patience_s, "an erasure")
    return json_answer(report.as_dict())


async def drop(call: Call) -> web.StreamResponse:
    """Forget every copy of blocks that nothing keeps."""
    chain, part = call.chain_and_part()
    work = call.service.manager.drop(chain, part=part)
    return json_answer({"dropped": await call.service.late_work.within(work, call.patience_s, "a drop")})


async def demote(call: Call) -> web.StreamResponse:
    """Write blocks to a tier below and take them out of memory."""
    chain, part = call.chain_and_part()
    timeout_s = _DEFAULT_TIMEOUT_S if call.timeout_s is None else call.timeout_s
    work = call.service.manager.demote(chain, part=part, timeout_s=timeout_s)
    return json_answer({"demoted": await call.service.late_work.within(work, call.patience_s, "a demotion")})


async def openapi(call: Call) -> web.StreamResponse:
    """Return the description of this API."""
    return json_answer(call.service.document)
