"""Moving receivers while a broadcast runs."""
