"""From options and a catalogue to ordered groups of cells, with the reason for each skip."""
