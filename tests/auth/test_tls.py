"""TLS of the server: versions, client certificates, and files that change while it runs."""

import asyncio
import contextlib
import datetime
import os
import shutil
import socket
import ssl
import subprocess
import warnings

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.errors import InvalidConfig
from kvstore.tls import ServerTls
from tests.tiers.certificates import Authority

WAIT_S = 30.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def first(authority):
    return authority.sign("first", alternative="IP:127.0.0.1")


@pytest.fixture(scope="module")
def second(authority):
    return authority.sign("second", alternative="IP:127.0.0.1")


@pytest.fixture(scope="module")
def client(authority):
    return authority.sign("client", alternative="DNS:client")


@pytest.fixture
def folder(tmp_path, first):
    made = tmp_path / "tls"
    made.mkdir()
    install(made, first)
    return made


def install(folder, certificate):
    shutil.copy(certificate.cert, folder / "tls.crt")
    shutil.copy(certificate.key, folder / "tls.key")


def trusting(authority, shown=None):
    context = ssl.create_default_context(cafile=authority.own.cert)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


@contextlib.asynccontextmanager
async def serving(folder):
    """A server that sends every line back, and what refreshes its certificates."""

    async def echo(reader, writer):
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        writer.close()

    async def accept():
        while True:
            sock, _ = await loop.sock_accept(listener)
            tasks.add(asyncio.create_task(greet(sock)))

    async def greet(sock):
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), echo)
        with contextlib.suppress(OSError), sock:
            await loop.connect_accepted_socket(lambda: protocol, sock.dup(), ssl=certificates.value)

    loop, tasks = asyncio.get_running_loop(), set()
    # What a failed handshake leaves is not this test's subject.
    loop.set_exception_handler(lambda *_: None)
    certificates = ServerTls(folder).reloaded()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(accept())
        yield listener.getsockname()[1], certificates
        for task in (accepting, *tasks):
            task.cancel()
        await asyncio.gather(accepting, *tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(port, context, **options):
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def said_back(reader, writer):
    writer.write(b"hello\n")
    async with asyncio.timeout(WAIT_S):
        return await reader.readline()


async def is_served(port, context):
    """Whether a client gets an answer. With TLS 1.3 it learns of a refusal when it reads."""
    try:
        async with connected(port, context) as streams:
            return await said_back(*streams) == b"hello\n"
    except (OSError, ssl.SSLError):
        return False


def name_of(writer):
    subject = writer.get_extra_info("peercert")["subject"]
    return dict(item for group in subject for item in group)["commonName"]


async def name_shown(port, context):
    async with connected(port, context) as (_, writer):
        return name_of(writer)


@pytest.mark.parametrize(
    ("version", "is_accepted"),
    [("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)],
)
async def test_tls_is_1_2_or_later(folder, authority, version, is_accepted):
    context = trusting(authority)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]

    async with serving(folder) as (port, _):
        assert await is_served(port, context) == is_accepted


async def test_plain_text_gets_no_answer(folder):
    async with serving(folder) as (port, _):
        assert not await is_served(port, None)


async def test_without_a_ca_no_client_certificate_is_asked_for(folder, authority):
    async with serving(folder) as (port, _):
        assert await is_served(port, trusting(authority))


async def test_with_a_ca_a_client_needs_a_certificate_of_it(folder, authority, stranger, client):
    shutil.copy(authority.own.cert, folder / "ca.crt")
    impostor = stranger.sign("client", alternative="DNS:client")

    async with serving(folder) as (port, _):
        assert not await is_served(port, trusting(authority))
        assert not await is_served(port, trusting(authority, impostor))
        assert await is_served(port, trusting(authority, client))


async def test_new_handshakes_show_a_renewed_certificate_and_connections_go_on(folder, authority, second):
    context = trusting(authority)
    async with serving(folder) as (port, certificates), connected(port, context) as (reader, writer):
        assert name_of(writer) == "first"
        install(folder, second)
        assert certificates.refresh()

        assert await name_shown(port, context) == "second"
        assert await said_back(reader, writer) == b"hello\n"


async def test_files_of_a_kubernetes_secret_are_followed_through_their_links(
    tmp_path, authority, first, second
):
    mounted = tmp_path / "mounted"
    for name, certificate in (("..1", first), ("..2", second)):
        (mounted / name).mkdir(parents=True)
        install(mounted / name, certificate)
    (mounted / "..data").symlink_to("..1")
    for name in ("tls.crt", "tls.key"):
        (mounted / name).symlink_to(f"..data/{name}")
    async with serving(mounted) as (port, certificates):
        assert await name_shown(port, trusting(authority)) == "first"

        (mounted / "..new").symlink_to("..2")
        (mounted / "..new").rename(mounted / "..data")
        assert certificates.refresh()

        assert await name_shown(port, trusting(authority)) == "second"


async def test_a_pipe_in_place_of_a_file_does_not_hold_up_what_comes_after_it(folder, authority, second):
    async with serving(folder) as (port, certificates):
        (folder / "tls.key").unlink()
        os.mkfifo(folder / "tls.key", 0o600)
        assert not certificates.refresh()

        (folder / "tls.key").unlink()
        install(folder, second)
        assert certificates.refresh()
        assert await name_shown(port, trusting(authority)) == "second"


@pytest.mark.parametrize("damage", ["key of another", "no key", "empty", "junk", "half"])
async def test_files_that_cannot_be_used_leave_the_certificate_in_force(folder, authority, second, damage):
    async with serving(folder) as (port, certificates):
        match damage:
            case "key of another":
                shutil.copy(second.key, folder / "tls.key")
            case "no key":
                (folder / "tls.key").unlink()
            case "empty":
                (folder / "tls.crt").write_bytes(b"")
            case "junk":
                (folder / "tls.crt").write_bytes(b"junk")
            case "half":
                whole = second.cert.read_bytes()
                (folder / "tls.crt").write_bytes(whole[: len(whole) // 2])

        assert not certificates.refresh()
        assert await name_shown(port, trusting(authority)) == "first"

        install(folder, second)
        assert certificates.refresh()
        assert await name_shown(port, trusting(authority)) == "second"


async def test_a_ca_that_vanishes_lets_nobody_in_without_a_certificate(folder, authority, client):
    shutil.copy(authority.own.cert, folder / "ca.crt")
    async with serving(folder) as (port, certificates):
        (folder / "ca.crt").unlink()

        assert not certificates.refresh()
        assert not await is_served(port, trusting(authority))
        assert await is_served(port, trusting(authority, client))


async def test_a_ca_that_appears_is_required_from_then_on(folder, authority, client):
    async with serving(folder) as (port, certificates):
        assert await is_served(port, trusting(authority))
        shutil.copy(authority.own.cert, folder / "ca.crt")
        assert certificates.refresh()

        assert not await is_served(port, trusting(authority))
        assert await is_served(port, trusting(authority, client))


async def test_a_client_of_an_authority_that_was_replaced_is_not_let_in_again(
    folder, authority, stranger, client
):
    shutil.copy(authority.own.cert, folder / "ca.crt")
    context = trusting(authority, client)
    async with serving(folder) as (port, certificates):
        assert await is_served(port, context)
        shutil.copy(stranger.own.cert, folder / "ca.crt")
        assert certificates.refresh()

        # The context remembers its session, if the server granted one.
        assert not await is_served(port, context)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
async def test_where_clients_are_checked_no_session_is_resumed(folder, authority, client, version):
    """A resumed session would be let in without a look at the client's certificate."""
    shutil.copy(authority.own.cert, folder / "ca.crt")
    context = trusting(authority, client)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    async with serving(folder) as (port, _):
        reused = await asyncio.to_thread(resumptions, context, port)

    assert reused == [False, False]


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
async def test_a_session_of_an_earlier_certificate_is_not_resumed(folder, authority, second, version):
    context = trusting(authority)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    async with serving(folder) as (port, certificates):

        def renew():
            install(folder, second)
            assert certificates.refresh()

        kept = await asyncio.to_thread(resumptions, context, port)
        renewed = await asyncio.to_thread(resumptions, context, port, renew)

    assert kept == [False, True]
    assert renewed == [False, False]


def resumptions(context, port, between=lambda: None):
    """Connect twice, the second time with the session of the first; say of each whether it resumed one."""
    reused, session = [], None
    for number in range(2):
        if number:
            between()
        with (
            socket.create_connection(("127.0.0.1", port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as wrapped,
        ):
            wrapped.sendall(b"hello\n")
            assert wrapped.recv(100) == b"hello\n"  # a session comes with the first answer
            reused.append(wrapped.session_reused)
            session = wrapped.session
    return reused


async def test_certificates_are_renewed_under_load_without_a_failed_handshake(
    folder, authority, first, second
):
    context = trusting(authority)
    names = set()
    async with serving(folder) as (port, certificates):

        async def connect_again_and_again():
            for _ in range(25):
                async with connected(port, context) as (reader, writer):
                    names.add(name_of(writer))
                    assert await said_back(reader, writer) == b"hello\n"

        async def renew():
            for number in range(20):
                install(folder, (second, first)[number % 2])
                assert await asyncio.to_thread(certificates.refresh)
                await asyncio.sleep(0)

        await asyncio.gather(renew(), *(connect_again_and_again() for _ in range(8)))

    assert names <= {"first", "second"}
    assert certificates.num_reloads == 20


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("no folder", "cannot be read: No such file"),
        ("no key", "cannot be read: No such file"),
        ("folder for a file", "tls.crt: cannot be read: Is a directory"),
        ("junk", "must be PEM"),
        ("large", "larger than"),
        ("junk ca", "ca.crt: is not PEM"),
        ("empty ca", "ca.crt: is not PEM"),
        ("ca to nowhere", "ca.crt: cannot be read"),
        ("encrypted", "the key not encrypted"),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_the_start(folder, damage, complaint):
    match damage:
        case "no folder":
            shutil.rmtree(folder)
        case "no key":
            (folder / "tls.key").unlink()
        case "folder for a file":
            (folder / "tls.crt").unlink()
            (folder / "tls.crt").mkdir()
        case "junk":
            (folder / "tls.key").write_text("junk")
        case "large":
            (folder / "tls.crt").write_bytes(b"\n" * ((1 << 20) + 1))
        case "junk ca":
            (folder / "ca.crt").write_text("junk")
        case "empty ca":
            (folder / "ca.crt").write_text("")
        case "ca to nowhere":
            (folder / "ca.crt").symlink_to("absent")
        case "encrypted":
            plain, sealed = folder / "tls.key", folder / "sealed"
            subprocess.run(
                ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", plain, "-out", sealed],
                check=True,
                capture_output=True,
            )
            sealed.rename(plain)

    with pytest.raises(InvalidConfig, match=complaint):
        ServerTls(folder).reloaded()


@pytest.mark.parametrize(("mode", "is_warned_of"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_others_may_read_is_warned_of(folder, caplog, mode, is_warned_of):
    (folder / "tls.key").chmod(mode)

    ServerTls(folder).reloaded()

    assert ("tls.key: others may read it" in caplog.text) == is_warned_of


def test_an_expired_certificate_is_warned_of(folder, caplog):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old")])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    (folder / "tls.crt").write_bytes(certificate.public_bytes(encoding))
    (folder / "tls.key").write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )

    ServerTls(folder).reloaded()

    assert "the certificate has expired on 2020-01-02: replace it" in caplog.text
