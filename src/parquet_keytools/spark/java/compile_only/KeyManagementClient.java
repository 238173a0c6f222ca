package org.apache.iceberg.encryption;

import java.io.Serializable;
import java.nio.ByteBuffer;
import java.util.Map;

/**
 * What our client implements of Iceberg's interface, which no jar of Spark has. It is compiled against, and left out of
 * our jar: at run time there is Iceberg's own.
 */
public interface KeyManagementClient extends Serializable {
  ByteBuffer wrapKey(ByteBuffer key, String wrappingKeyId);

  ByteBuffer unwrapKey(ByteBuffer wrappedKey, String wrappingKeyId);

  void initialize(Map properties);
}
