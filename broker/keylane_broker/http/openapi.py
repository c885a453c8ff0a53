"""The OpenAPI document, made from the list of operations and their types."""

import re
from inspect import cleandoc
from typing import Any, get_args

import msgspec
from starlette.responses import Response

from keylane_broker.http.operations import OPERATIONS, Operation, answers_by_itself
from keylane_broker.http.problems import MEDIA_TYPE, Problem
from keylane_broker.http.values import BODY_NAME, LONGEST_NAME, NAME

_REF = "#/components/schemas/{name}"
_NAME = {"type": "string", "pattern": NAME, "maxLength": LONGEST_NAME}
_PATH: dict[str, dict[str, Any]] = {
    "id": {"type": "string", "minLength": 1},
    "name": {"type": "string", "pattern": BODY_NAME},
    "partition": {"type": "integer", "minimum": 0},
}
_TEXT: dict[str, Any] = {"type": "string"}
_INSTANT: dict[str, Any] = {"type": "string", "format": "date-time"}
_SECONDS: dict[str, Any] = {"type": "number", "minimum": 0}
_HEADERS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {  # of operations: what each says, and its type
    "publish": {
        "Idempotency-Key": ("The messages are published once, however often the request is repeated", _TEXT),
        "Keylane-Key": (
            "The key of a message whose body is that of the request, as for the next ones",
            _TEXT,
        ),
        "Keylane-Partition": ("Its partition", _PATH["partition"]),
        "Keylane-Delay": ("Seconds until it is delivered", _SECONDS),
        "Keylane-Deliver-At": ("When it is delivered", _INSTANT),
        "Keylane-Durability": ("Its durability", _TEXT),
        "Keylane-Ttl": ("Seconds until it expires", _SECONDS),
        "Keylane-Expires-At": ("When it expires", _INSTANT),
        "Keylane-Priority": ("Its priority", {"type": "integer", "minimum": 0, "maximum": 9}),
        "Keylane-Producer-Group": ("Its producer group, which alone may delete it", _TEXT),
    },
    "events": {"Last-Event-ID": ("The last event that was received before the stream was lost", _TEXT)},
}
_PARAMETER = re.compile(r"{(\w+)}")


def document(version: str) -> dict[str, Any]:
    """Return the document."""
    types = [Problem]
    for one in OPERATIONS:
        types += [kind for kind in (one.body, one.query, *_replies(one)) if kind not in (None, type(None))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(map(_name, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        place = one.path
        paths.setdefault(place, {})[one.method.lower()] = _described(one, known, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Keylane",
            "version": version,
            "description": "A message broker on Redis or Valkey.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _name(kind: Any) -> str:
    return repr(kind)


def _replies(one: Operation) -> list[Any]:
    """Return the types of JSON that an operation may answer with."""
    kinds = (
        get_args(one.reply)
        if not isinstance(one.reply, type) and not hasattr(one.reply, "__origin__")
        else ()
    )
    found = kinds or (one.reply,)
    return [kind for kind in found if not (isinstance(kind, type) and issubclass(kind, Response))]


def _described(one: Operation, known: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "description": cleandoc(one.handler.__doc__ or ""),
        "parameters": [
            *_path_parameters(one),
            *_query_parameters(one, known, components),
            *_header_parameters(one),
        ],
        "responses": _responses(one, known),
    }
    said["security"] = [{"token": []}, {}]  # none where the broker lets everybody in
    said["x-keylane-action"] = one.action
    if one.body is not None or one.takes:
        content: dict[str, Any] = {}
        if one.body is not None:
            content["application/json"] = {"schema": known[_name(one.body)]}
        for kind in one.takes:
            content[kind] = {"schema": {"type": "string", "format": "binary"}}
        said["requestBody"] = {"required": True, "content": content}
    return said


def _path_parameters(one: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _PATH.get(name, _NAME),
        }
        for name in _PARAMETER.findall(one.path)
    ]


def _header_parameters(one: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in _HEADERS.get(one.name, {}).items()
    ]


def _query_parameters(
    one: Operation, known: dict[str, Any], components: dict[str, Any]
) -> list[dict[str, Any]]:
    if one.query is None:
        return []
    schema = known[_name(one.query)]
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": part}
        for name, part in schema["properties"].items()
    ]


def _responses(one: Operation, known: dict[str, Any]) -> dict[str, Any]:
    failed = {
        "description": "What is wrong, and what to do",
        "content": {MEDIA_TYPE: {"schema": known[_name(Problem)]}},
    }
    done: dict[str, Any] = {"description": one.summary}
    kinds = [known[_name(kind)] for kind in _replies(one) if kind not in (None, type(None))]
    if kinds:
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        done["content"] = {one.gives: {"schema": schema}}
    elif answers_by_itself(one) and one.status != 204:
        done["content"] = {one.gives: {"schema": {"type": "string"}}}
    found = {str(one.status): done, "default": failed}
    if one.name == "publish":
        found["207"] = {
            **done,
            "description": "Some messages were not published; each says what became of it",
        }
    return found
