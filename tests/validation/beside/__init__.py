"""`make validate PART=timer`: are times, intervals and rankings the same beside other work?"""
