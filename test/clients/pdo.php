<?php
// PDO, which has no pool: one connection.
require getenv('EXAMPLE');

$options = getenv('POOLER') ? [PDO::PGSQL_ATTR_DISABLE_PREPARES => true] : [];
$connection = new PDO(sprintf('pgsql:host=%s;port=%s;dbname=%s;user=%s', getenv('PGHOST'), getenv('PGPORT'),
    getenv('PGDATABASE'), getenv('PGUSER')), null, null, $options);

function bind(PDOStatement $statement, int $n, string $type, string $text): void
{
    match ($type) {
        'i' => $statement->bindValue($n, (int) $text, PDO::PARAM_INT),
        'a', 'b' => $statement->bindValue($n, '{"' . str_replace('|', '","', $text) . '"}'),
        'n' => $statement->bindValue($n, null, PDO::PARAM_NULL),
        default => $statement->bindValue($n, $text),
    };
}

function answer(PDO $connection, string $sql, array $params): array
{
    $pid = '';
    try {
        if ($sql === 'version') {
            return ['', 'ok', 'PHP PDO ' . PHP_VERSION];
        }
        if ($sql === 'place_order') {
            place_order($connection, (int) substr($params[0], 2));
            return ['', 'ok'];
        }
        $pid = $connection->query('SELECT pg_backend_pid()')->fetchColumn();
        $statement = $connection->prepare($sql);
        foreach ($params as $i => $param) {
            bind($statement, $i + 1, $param[0], substr($param, 2));
        }
        $statement->execute();
        $row = $statement->columnCount() ? $statement->fetch(PDO::FETCH_NUM) : [];
        return [$pid, 'ok', ...array_map(
            fn ($value) => get_debug_type($value) . ':' . (is_bool($value) ? var_export($value, true) : $value), $row ?: [])];
    } catch (PDOException $error) {
        // All fields that there are, in one text.
        preg_match('/ERROR: +(.*)/', $error->getMessage(), $message);
        preg_match('/^DETAIL: +(.*)/m', $error->getMessage(), $detail);
        preg_match('/^HINT: +(.*)/m', $error->getMessage(), $hint);
        return [$pid, 'error', get_class($error), $error->getCode(), retry_after($error),
            $message[1] ?? '', $detail[1] ?? '', $hint[1] ?? '', '', '', ''];
    }
}

while (($line = fgets(STDIN)) !== false) {
    $fields = explode("\t", rtrim($line, "\n"));
    echo str_replace("\n", '\n', implode("\t", answer($connection, $fields[0], array_slice($fields, 1)))), "\n";
}
