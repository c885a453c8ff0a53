"""Who may do what: permissions, and tokens that others have signed."""

import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm

from keylane.errors import Forbidden, InvalidArgument, Unauthorized
from keylane.wire import Type
from keylane_broker.access.actions import ACTIONS, NEEDS
from keylane_broker.access.control import AccessControl
from keylane_broker.access.identity import EVERYBODY, Identity, parse_grant
from keylane_broker.access.jwt_keys import JwtKeys
from keylane_broker.errors import ServerError
from keylane_broker.http.app import OPERATIONS
from keylane_broker.store.keys import TOKENS
from keylane_broker.worker.requests.table import HANDLERS
from tests.support.fake import fake_engine

SECRET = b"a secret of thirty-two bytes, or more"


def identity(*grants: str) -> Identity:
    return Identity("somebody", tuple(map(parse_grant, grants)))


@pytest.mark.parametrize(
    ("grant", "action", "topic", "allowed"),
    [
        ("produce:orders", "produce", "orders", True),
        ("produce:orders", "produce", "orders2", False),
        ("produce:orders", "consume", "orders", False),
        ("produce:orders", "observe", "orders", True),
        ("consume:orders.*", "consume", "orders.eu", True),
        ("consume:orders.*", "consume", "ordersXeu", False),
        ("consume:orders.*", "consume", "orders.", True),
        ("observe:*", "observe", None, True),
        ("observe:orders*", "observe", None, False),
        ("admin:*", "produce", "anything", True),
        ("admin:*", "admin", None, True),
        ("admin:a*c", "admin", "abc", True),
        ("admin:a*c", "admin", "abcd", False),
        ("observe:*", "consume", "orders", False),
        ("admin:a*b*c", "admin", "abbcbc", True),
        ("admin:a**c", "admin", "ac", True),
        ("admin:ab*ba", "admin", "aba", False),
        ("admin:a*b*b*c", "admin", "abc", False),
        ("produce:*.orders.*", "produce", ".orders." * 200_000, True),
        ("produce:*.orders.*.eu", "produce", ".orders." * 200_000 + "\n", False),  # days, by backtracking
    ],
)
def test_a_permission_is_an_action_on_topics(
    grant: str, action: Any, topic: str | None, allowed: bool
) -> None:
    assert identity(grant).may(action, topic) is allowed
    if not allowed:
        with pytest.raises(Forbidden, match="somebody"):
            identity(grant).require(action, topic)


@pytest.mark.parametrize(
    "text", ["", "produce", "produce:", "eat:orders", "produce:or ders", "produce:a\n", ":x"]
)
def test_what_is_no_permission_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="produce:orders"):
        parse_grant(text)


def test_many_stars_are_matched_in_no_time() -> None:
    assert not identity("admin:" + "*a" * 90).may("admin", "a" * 80 + "b")
    assert EVERYBODY.may("admin", None)


def test_every_operation_has_its_permission() -> None:
    """A new one without fails here, and would fail at its first use."""
    names = {Type(kind).name.lower() for kind in HANDLERS} - {"unsubscribe"}
    assert names | {one.name for one in OPERATIONS} | {"publish"} == NEEDS.keys()
    assert set(NEEDS.values()) == {*ACTIONS, "use"}


# JWTs


def signed(key: Any, algorithm: str, *, age: float = -60.0, **claims: Any) -> str:
    said = {"sub": "shop", "exp": time.time() - age, "scope": "produce:orders.* observe:*", **claims}
    return jwt.encode({name: value for name, value in said.items() if value is not None}, key, algorithm)


def keys_in(folder: Path, text: bytes) -> JwtKeys:
    file = folder / "keys"
    file.write_bytes(text)
    return JwtKeys(file)


def pem(key: Any) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[no-any-return]


def test_tokens_of_each_kind_of_key_are_accepted(tmp_path: Path) -> None:
    rsa_key = rsa.generate_private_key(65537, 2048)
    ed_key = ed25519.Ed25519PrivateKey.generate()
    for text, key, algorithm in (
        (SECRET, SECRET, "HS256"),
        (pem(rsa_key), rsa_key, "RS256"),
        (pem(ed_key), ed_key, "EdDSA"),
    ):
        found = keys_in(tmp_path, text).identify(signed(key, algorithm))
        assert (found.name, found.may("produce", "orders.eu"), found.may("consume", "orders.eu")) == (
            "shop",
            True,
            False,
        )
        assert found.expires > time.time()


def test_what_is_not_signed_by_a_key_has_expired_or_says_nothing_is_not_accepted(tmp_path: Path) -> None:
    rsa_key = rsa.generate_private_key(65537, 2048)
    keys = keys_in(tmp_path, pem(rsa_key))
    another = rsa.generate_private_key(65537, 2048)
    confused = jwt.utils.base64url_encode  # a public key taken for a secret, as old libraries did
    claims = b'{"sub":"x","exp":99999999999,"scope":"admin:*"}'
    header = confused(b'{"alg":"HS256","typ":"JWT"}') + b"." + confused(claims)
    forged = (header + b"." + confused(hmac.new(pem(rsa_key), header, hashlib.sha256).digest())).decode()
    for token in (
        "nonsense",
        "a.b.c",
        signed(another, "RS256"),
        signed(rsa_key, "RS256", age=3600.0),
        signed(rsa_key, "RS256", exp=None),
        signed(rsa_key, "RS256", sub=None),
        signed(rsa_key, "RS256", scope="eat:everything"),
        signed(rsa_key, "RS256", exp=10**400),
        jwt.encode({"sub": "x", "exp": time.time() + 60, "scope": "admin:*"}, "", "none"),
        forged,
    ):
        with pytest.raises(Unauthorized):
            keys.identify(token)


def test_keys_are_read_anew_when_their_file_has_changed(tmp_path: Path) -> None:
    keys = keys_in(tmp_path, SECRET)
    other = SECRET[::-1] + b"!"
    with pytest.raises(Unauthorized):
        keys.identify(signed(other, "HS256"))
    (tmp_path / "keys").write_bytes(other)
    assert keys.identify(signed(other, "HS256")).name == "shop"
    (tmp_path / "keys").unlink()  # it is being replaced
    assert keys.identify(signed(other, "HS256")).name == "shop"


def test_who_was_let_in_by_a_key_goes_with_it(tmp_path: Path) -> None:
    keys = keys_in(tmp_path, SECRET)
    found = keys.identify(signed(SECRET, "HS256"))
    assert keys.trusts(found.key)
    other = ed25519.Ed25519PrivateKey.generate()
    said = {**OKPAlgorithm.to_jwk(other.public_key(), as_dict=True), "kid": "1"}
    (tmp_path / "keys").write_text(json.dumps({"keys": [said]}))
    keys.refresh()
    assert not keys.trusts(found.key)
    other_found = keys.identify(signed(other, "EdDSA"))
    (tmp_path / "keys").write_text(json.dumps({"keys": [said, {**said, "kid": "2"}]}))
    keys.refresh()
    assert keys.trusts(other_found.key)


def test_a_file_that_is_no_longer_keys_is_logged_once_and_those_before_count_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_in(tmp_path, SECRET)
    (tmp_path / "keys").write_text("short")
    for _ in range(3):
        assert keys.identify(signed(SECRET, "HS256")).name == "shop"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_set_of_keys_is_chosen_from_by_their_ids(tmp_path: Path) -> None:
    first, second = ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)
    one = {**OKPAlgorithm.to_jwk(first.public_key(), as_dict=True), "kid": "1"}
    two = {**RSAAlgorithm.to_jwk(second.public_key(), as_dict=True), "kid": "2"}
    keys = keys_in(tmp_path, json.dumps({"keys": [one, two]}).encode())
    claims = {"sub": "shop", "exp": time.time() + 60, "scope": ""}
    assert keys.identify(jwt.encode(claims, second, "RS256", headers={"kid": "2"})).grants == ()
    with pytest.raises(Unauthorized):
        keys.identify(jwt.encode(claims, second, "RS256", headers={"kid": "1"}))


@pytest.mark.parametrize(
    "text",
    [
        b"short",
        b"-----BEGIN nothing",
        b'{"keys": [{"kty": "EC"}]}',
        b"{",
        b'{"kty": "oct", "k": "' + b"a" * 80 + b'"}',  # not a set
        b'{"keys": ["text"]}',
        b'{"keys": [{"kty": "oct", "k": "YQ"}]}',  # a secret of one byte
        b'[{"kty": "RSA", "e": "AQAB", "n": "' + b"a" * 400 + b'"}]',  # public, so it is no secret
        pem(rsa.generate_private_key(65537, 1024)),
        pem(ec.generate_private_key(ec.SECP256R1())),
    ],
    ids=[str(number) for number in range(10)],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ServerError, match="keys"):
        keys_in(tmp_path, text)


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"# the key of our provider\n"])
def test_a_public_key_is_never_taken_for_a_secret(tmp_path: Path, before: bytes) -> None:
    key = rsa.generate_private_key(65537, 2048)
    for text in (
        pem(key),
        json.dumps({"keys": [RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)]}).encode(),
    ):
        if before[:1] == b"#" and text[:1] == b"{":
            continue
        keys = keys_in(tmp_path, before + text)
        assert keys.identify(signed(key, "RS256")).name == "shop"
        with pytest.raises(Unauthorized):
            keys.identify(signed(SECRET, "HS256"))


def test_of_a_private_key_only_the_public_part_is_used(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    keys = keys_in(tmp_path, json.dumps({"keys": [RSAAlgorithm.to_jwk(key, as_dict=True)]}).encode())
    assert keys.identify(signed(key, "RS256")).name == "shop"


async def test_tokens_that_stay_as_they_are_are_not_read_again() -> None:
    access = AccessControl(fake_engine().store, enabled=True, admin_token="", jwt_keys=None)
    await access.open()
    made = [await access.create(name, ["observe:*"], 0, 0) for name in ("a", "b", "c")]
    before = {id: await access.identify(text) for id, text in made}
    await access.revoke(made[0][0])
    with pytest.raises(Unauthorized, match="revoked"):
        access.check(before[made[0][0]])
    changed = msgspec.structs.replace((await access.tokens())[made[1][0]], grants=["produce:*"])
    await access._store.command("HSET", TOKENS, made[1][0], msgspec.json.encode(changed).decode())
    await access.refresh()
    with pytest.raises(Unauthorized):
        await access.identify(made[0][1])
    assert (await access.identify(made[1][1])).grants == (parse_grant("produce:*"),)
    assert await access.identify(made[2][1]) is before[made[2][0]]
