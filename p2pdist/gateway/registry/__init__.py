"""The registry interface of an agent: clients of container registries read images through it."""
