"""JSON Web Tokens: the keys by which they are trusted, read from a file, and anew when that has changed."""

import codecs
import hashlib
import logging
from pathlib import Path
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from jwt.algorithms import get_default_algorithms

from keylane.errors import InvalidArgument, Unauthorized
from keylane_broker.access.identity import Identity, parse_grant
from keylane_broker.errors import ServerError

log = logging.getLogger("keylane.broker")

_LEAST_SECRET = 32  # bytes: a shorter one can be guessed
_LEAST_RSA = 2_048  # bits
_ALGORITHMS = {"RSA": "RS256", "OKP": "EdDSA", "oct": "HS256"}
_LEEWAY = 5.0  # seconds by which clocks may differ


class JwtKeys:
    """The keys in a file: a JWK set, a public key as PEM, or a secret as it is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_at: tuple[int, int] | None = None
        self._keys: list[tuple[str | None, Any, list[str]]] = []  # id, key, and what it may have signed by
        self._trusted = frozenset[str]()  # the digests of those
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it has changed."""
        try:
            stat = self._file.stat()
            if self._read_at != (now := (stat.st_mtime_ns, stat.st_size)):
                text = self._file.read_bytes()
                if self._read_at is not None:
                    self._read_at = now  # whatever is in it is said once
                self._keys = _parse(text)
                self._trusted = frozenset(_digest(key) for _, key, _ in self._keys)
                self._read_at = now
        except OSError as error:
            if self._read_at is None:
                raise ServerError(f"the keys of JWTs cannot be read: {error}") from None
            # It is being replaced: those that were there count until others are.
        except Exception as error:  # the libraries that read it have many, and nobody else is to suffer
            if self._read_at is None:
                raise ServerError(f"{self._file} holds no keys for JWTs: {error}") from None
            log.warning("%s holds no keys for JWTs, those before count on: %s", self._file, error)

    def trusts(self, digest: str) -> bool:
        """Whether a key that a token was accepted by is still one of these."""
        return digest in self._trusted

    def identify(self, token: str) -> Identity:
        """Return whom a token names. Raises Unauthorized if it is not to be trusted, or has expired."""
        self.refresh()
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
        except jwt.PyJWTError:
            raise Unauthorized("the token is not known") from None
        problem: Exception | None = None
        for known_id, key, algorithms in self._keys:
            if key_id is None or known_id is None or known_id == key_id:
                try:
                    said = jwt.decode(
                        token,
                        key,
                        algorithms=algorithms,
                        leeway=_LEEWAY,
                        options={"require": ["exp", "sub"], "verify_aud": False},
                    )
                    return _identity(said, _digest(key))
                except jwt.PyJWTError as error:
                    problem = error
        raise Unauthorized(f"the JWT is not accepted: {problem or 'no key is known for it'}")


def _identity(said: dict[str, Any], key: str) -> Identity:
    scope = said.get("scope", "")
    texts = scope.split() if isinstance(scope, str) else scope
    try:
        grants = tuple(parse_grant(str(text)) for text in texts)
    except (InvalidArgument, TypeError) as error:
        raise Unauthorized(f"the JWT is not accepted: its scope says {error}") from None
    try:
        expires = float(said["exp"])
    except OverflowError:
        raise Unauthorized("the JWT is not accepted: its exp is no time") from None
    return Identity(str(said["sub"]), grants, expires=expires, key=key)


def _digest(key: Any) -> str:
    """Return what tells a key from others."""
    if not isinstance(key, bytes):
        key = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).hexdigest()


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


def _parse(text: bytes) -> list[tuple[str | None, Any, list[str]]]:
    stripped = text.removeprefix(codecs.BOM_UTF8).strip()
    if stripped.startswith(b"{"):
        return [_jwk(key) for key in msgspec.json.decode(stripped, type=_KeySet).keys]
    if (begin := stripped.find(b"-----BEGIN")) >= 0:  # there may be remarks before it
        return [(None, *_trusted(load_pem_public_key(stripped[begin:])))]
    return [(None, *_trusted(stripped))]


def _jwk(said: dict[str, Any]) -> tuple[str | None, Any, list[str]]:
    kind = str(said.get("kty"))
    if kind not in _ALGORITHMS:
        raise ValueError(f"keys of type {kind!r} are not known: use {', '.join(_ALGORITHMS)}")
    return said.get("kid"), *_trusted(jwt.PyJWK(said, _ALGORITHMS[kind]).key)


def _trusted(key: Any) -> tuple[Any, list[str]]:
    """Return a key as it can be used, and what it may have signed by. Raises ValueError unless it is safe."""
    if isinstance(key, RSAPrivateKey | Ed25519PrivateKey):
        key = key.public_key()
    if isinstance(key, bytes):
        if len(key) < _LEAST_SECRET:
            raise ValueError(f"a secret has {_LEAST_SECRET} bytes at least")
        kind = "oct"
        get_default_algorithms()[_ALGORITHMS[kind]].prepare_key(key)  # refuses what others can read
    elif isinstance(key, RSAPublicKey):
        if key.key_size < _LEAST_RSA:
            raise ValueError(f"an RSA key has {_LEAST_RSA} bits at least")
        kind = "RSA"
    elif isinstance(key, Ed25519PublicKey):
        kind = "OKP"
    else:
        raise ValueError("it is neither an RSA nor an Ed25519 key")
    return key, [_ALGORITHMS[kind]]
