"""Pure cores of a host: events in, commands out, `now` passed in; no clock, randomness, asyncio,
file or socket inside."""
