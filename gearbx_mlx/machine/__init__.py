"""Machine state (heat, battery, memory), and the controller that caps layers by it and by speed. Numbers only."""
