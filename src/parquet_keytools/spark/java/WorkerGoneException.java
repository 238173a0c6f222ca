package parquet_keytools;

/** The worker process is not there any more: another one may answer. */
final class WorkerGoneException extends Exception {
  WorkerGoneException(String message) {
    super(message);
  }
}
