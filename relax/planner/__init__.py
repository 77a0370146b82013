"""The planner: what a run would do, by discrete events around the gate that the controller uses. Starts nothing."""
