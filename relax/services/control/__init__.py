"""What the controller is made of. A group walks issue -> groups -> batches -> weights; outbox says what came of it."""
