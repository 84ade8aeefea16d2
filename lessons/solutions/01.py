# Fetching and computing overlap; the slower one is what you wait for.
def pass_seconds(machine, shape, num_rows, tokens_per_row, context):
    fetched = shape.num_weights * shape.bytes_per_weight
    fetched += num_rows * context * shape.cache_bytes_per_token
    operations = 2 * shape.num_weights * num_rows * tokens_per_row
    return max(fetched / machine.bytes_per_second, operations / machine.operations_per_second)
