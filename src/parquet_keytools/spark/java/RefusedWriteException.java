package parquet_keytools;

import org.apache.parquet.crypto.ParquetCryptoRuntimeException;

/** A write that the driver refuses. It has no trace: Python shows one, and it would only say how Spark plans. */
public class RefusedWriteException extends ParquetCryptoRuntimeException {
  RefusedWriteException(String message) {
    super(message);
  }

  public Throwable fillInStackTrace() {
    return this;
  }

  /** Does nothing: Spark would add traces of its own. */
  public void setStackTrace(StackTraceElement[] trace) {}
}
