package parquet_keytools;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.mapreduce.JobContext;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.hadoop.ParquetOutputFormat;
import org.apache.spark.sql.execution.datasources.parquet.ParquetWriteSupport;
import org.apache.spark.sql.execution.streaming.ManifestFileCommitProtocol;

/**
 * Spark's own protocol for the files of a stream, which checks each batch on the driver before its tasks start. Spark
 * plans no write for it, and its sink does not say of what format the files are; the job does.
 */
public class StreamCommitProtocol extends ManifestFileCommitProtocol {
  private final String path;

  public StreamCommitProtocol(String jobId, String path) {
    super(jobId, path);
    this.path = path;
  }

  public void setupJob(JobContext job) {
    try {
      check(job.getConfiguration());
    } catch (RuntimeException refused) {
      removeEmptyLog(job.getConfiguration());
      throw refused;
    }
    super.setupJob(job);
  }

  public void abortJob(JobContext job) {
    super.abortJob(job);
    removeEmptyLog(job.getConfiguration());
  }

  /**
   * Removes what Spark made when the stream started: beside a log without a batch, all files that were in the folder
   * before would read as no rows.
   */
  private void removeEmptyLog(Configuration configuration) {
    try {
      Path log = new Path(path, "_spark_metadata");
      FileSystem files = log.getFileSystem(configuration);
      if (files.exists(log) && files.listStatus(log).length == 0) {
        files.delete(log, false);
      }
    } catch (IOException error) {
      // The write has failed for another reason already, which its caller reports.
    }
  }

  private static void check(Configuration configuration) {
    if (configuration.get(ParquetOutputFormat.WRITE_SUPPORT_CLASS) == null) {
      String found = KeytoolsCryptoFactory.keyOption(configuration);
      if (found != null && !KeytoolsCryptoFactory.isPlaintextAllowed(configuration)) {
        throw new ParquetCryptoRuntimeException(
            "This stream would be written in plaintext, although its options name " + found + ": Spark encrypts only"
                + " Parquet files. Write Parquet, or leave the options out.");
      }
    } else if (KeytoolsCryptoFactory.isOurs(configuration)) {
      KeytoolsCryptoFactory.checkWrite(
          configuration, "The stream", null, new ParquetWriteSupport().init(configuration),
          new ObjectMapper().createObjectNode());
    }
  }
}
