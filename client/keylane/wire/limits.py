"""How much a frame may say."""

MAX_BATCH = 1_000  # messages in a PUBLISH, receipts in a settling frame: a script blocks the server
MAX_KEY = 1_024  # bytes, as the next
MAX_UID = 256
MAX_PRODUCER = 64  # characters
MAX_NUMBER = 10**13  # of a producer's message: Lua prints these digit by digit
