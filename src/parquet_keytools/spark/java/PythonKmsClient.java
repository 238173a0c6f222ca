package parquet_keytools;

import java.nio.charset.StandardCharsets;
import org.apache.hadoop.conf.Configuration;
import org.apache.parquet.crypto.keytools.KmsClient;

/**
 * parquet-java's door to the KMS clients of parquet-keytools: passes every request on to a worker process in
 * Python. Compiled by Janino, which knows no lambdas and not all of generics.
 */
public class PythonKmsClient implements KmsClient {
  private KmsWorker worker;
  private String instanceId;

  public void initialize(Configuration configuration, String instanceId, String instanceUrl, String accessToken) {
    // The URL may come from a file, and chooses no KMS. The instance selects among those of the configuration.
    this.instanceId = instanceId;
    worker = KmsWorker.of(configuration);
  }

  public String wrapKey(byte[] key, String masterKeyId) {
    return new String(worker.askForKey(KmsWorker.WRAP, key, named(instanceId, masterKeyId)), StandardCharsets.UTF_8);
  }

  public byte[] unwrapKey(String wrappedKey, String masterKeyId) {
    return worker.askForKey(KmsWorker.UNWRAP, wrappedKey.getBytes(StandardCharsets.UTF_8),
        named(instanceId, masterKeyId));
  }

  /** Returns what the worker is asked with: the KMS of the file, a line end, and the master key as the file says. */
  static String named(String instanceId, String masterKeyId) {
    return instanceId == null || masterKeyId.indexOf('\n') >= 0 ? masterKeyId : instanceId + '\n' + masterKeyId;
  }
}
