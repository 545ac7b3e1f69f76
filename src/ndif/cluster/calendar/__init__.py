"""What an iCalendar text says: its events, when they happen, and which models they ask for."""
