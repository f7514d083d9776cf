"""What a handoff is measured against: the same state saved, all workers stopped, the target
layout's workers started, the state loaded into another layout, and the first step done."""
