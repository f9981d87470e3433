"""Pure core of the tracker: events in, commands out, `now` passed in; no clock, randomness,
asyncio, file or socket inside."""
