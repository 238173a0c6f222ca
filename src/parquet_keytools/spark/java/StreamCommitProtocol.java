package parquet_keytools;

import com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.hadoop.conf.Configuration;
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
  public StreamCommitProtocol(String jobId, String path) {
    super(jobId, path);
  }

  public void setupJob(JobContext job) {
    Configuration configuration = job.getConfiguration();
    if (configuration.get(ParquetOutputFormat.WRITE_SUPPORT_CLASS) == null) {
      String found = KeytoolsCryptoFactory.keyOption(configuration);
      if (found != null && !KeytoolsCryptoFactory.isPlaintextAllowed(configuration)) {
        throw new ParquetCryptoRuntimeException(
            "This stream would be written in plaintext, although its options name " + found + ": Spark encrypts only"
                + " Parquet files. Write Parquet, or leave the options out.");
      }
    } else if (KeytoolsCryptoFactory.isOurs(configuration)) {
      KeytoolsCryptoFactory.checkWrite(
          configuration, "The stream", new ParquetWriteSupport().init(configuration),
          new ObjectMapper().createObjectNode());
    }
    super.setupJob(job);
  }
}
