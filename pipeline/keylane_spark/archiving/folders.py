"""The folders of an archive: `<archive>/topic=<topic>/date=<day>`."""

from keylane_spark.errors import JobError
from keylane_spark.files import Files


def folders_of(files: Files, root: str) -> list[str]:
    """The folders of an archive that hold files: `topic=…/date=…`."""
    return [
        f"{topic.name}/{day.name}"
        for topic in files.entries(root)
        if topic.folder and topic.name.startswith("topic=")
        for day in files.entries(f"{root}/{topic.name}")
        if day.folder and day.name.startswith("date=")
    ]


def archive_folder(path: str, topic: str, files: Files) -> str:
    """Where an archive has a topic."""
    folder = f"{path.rstrip('/')}/topic={topic}"
    if not files.exists(folder):
        there = [one.name.removeprefix("topic=") for one in files.entries(path) if "topic=" in one.name]
        raise JobError(f"no archive of {topic!r} in {path}; it has {', '.join(there) or 'no topic'}")
    return folder
