"""The daemon on every host: joins the pure cores with store, streams, origin and tracker, and
offers a local API."""
