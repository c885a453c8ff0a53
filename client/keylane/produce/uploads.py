"""Storing the bodies of a frame, before that is sent."""

from keylane.errors import BrokerError
from keylane.payloads.bodies import Bodies
from keylane.produce.publish_frame import PublishFrame


async def store_bodies(bodies: Bodies, topic: str, frame: PublishFrame) -> dict[int, Exception]:
    """Store the bodies of a frame. Returns the errors of those that the store refuses for good, by place.

    Raises what concerns all of them: errors that are retriable, and any error where the frame is strict.
    """
    refused: dict[int, Exception] = {}
    rest = [list(frame.bodies)]
    while rest:
        places = rest.pop()
        try:
            await bodies.put(topic, [frame.bodies[place] for place in places], frame.durability)
        except Exception as error:
            if frame.strict or (isinstance(error, BrokerError) and error.retriable):
                raise
            if len(places) == 1:
                refused[places[0]] = error
            else:  # which of them it is nobody says
                half = len(places) // 2
                rest += [places[half:], places[:half]]
    return refused
