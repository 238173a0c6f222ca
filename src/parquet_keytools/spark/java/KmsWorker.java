package parquet_keytools;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.ByteArrayOutputStream;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.parquet.crypto.KeyAccessDeniedException;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.apache.parquet.format.FileMetaData;
import org.apache.parquet.format.Util;
import org.apache.spark.SparkEnv;
import org.apache.spark.SparkFiles;

/** The worker of one configuration in this JVM: its process is started when it is needed, and again when it died. */
final class KmsWorker {
  static final int START = 1;
  static final int WRAP = 2;
  static final int UNWRAP = 3;
  static final int CHECK = 5;
  static final int WRAP_KEK = 6;
  static final int UNWRAP_KEK = 7;
  static final int CHECK_WRITE = 8;

  static final int OK = 0;
  static final int DENIED = 1;

  static final String CONFIGURATION = "parquet.keytools.configuration";
  private static final String PYTHON = "parquet.keytools.worker.python";
  private static final String DRIVER_PYTHON = "parquet.keytools.worker.python.driver";
  private static final String TIMEOUT = "parquet.keytools.worker.timeout.seconds";

  private static final int MOST_CHECKED = 10000;
  private static final int MOST_NAME_BYTES = 65535;

  private static final Map WORKERS = new HashMap();
  private static boolean hasHook = false;
  private static volatile boolean isEnding = false;

  private final String python;
  private final String encodedConfiguration;
  private final long timeoutMilliseconds;
  /** What was found to be as its table says -> the answer. */
  private final Map checked = new HashMap();
  private WorkerProcess process;
  /** What the worker says of its configuration. */
  private List facts = new ArrayList();

  private KmsWorker(String python, String encodedConfiguration, long timeoutMilliseconds) {
    this.python = python;
    this.encodedConfiguration = encodedConfiguration;
    this.timeoutMilliseconds = timeoutMilliseconds;
  }

  /** Returns the worker for the configuration of a session. */
  static KmsWorker of(Configuration configuration) {
    String encoded = configuration.get(CONFIGURATION);
    if (encoded == null) {
      throw new ParquetCryptoRuntimeException(
          CONFIGURATION + " is not set. Make the session with parquet_keytools.spark.configure.");
    }
    String python = configuration.get(isDriver() ? DRIVER_PYTHON : PYTHON);
    return of(encoded, python == null ? "python3" : python, configuration.getLong(TIMEOUT, 120) * 1000);
  }

  /** Returns the one worker for a configuration, in base64, which all threads of this JVM share. */
  static KmsWorker of(String encoded, String python, long timeout) {
    String identity = python + '\n' + timeout + '\n' + encoded;
    synchronized (WORKERS) {
      KmsWorker worker = (KmsWorker) WORKERS.get(identity);
      if (worker == null) {
        worker = new KmsWorker(python, encoded, timeout);
        WORKERS.put(identity, worker);
        if (!hasHook) {
          Runtime.getRuntime().addShutdownHook(new Thread("parquet-keytools shutdown") {
            public void run() {
              endAll();
            }
          });
          hasHook = true;
        }
      }
      return worker;
    }
  }

  /**
   * Fails where what a file says of its footer's key and of its AAD is not what its table says.
   *
   * @return the AAD prefixes that the file may have, as JSON
   */
  JsonNode checkFooter(ObjectNode seen, ObjectNode aad, String file) {
    ObjectNode request = seen.deepCopy();
    request.put("file", file);
    request.set("aad", aad);
    try {
      return new ObjectMapper().readTree(ask(CHECK, request.toString().getBytes(StandardCharsets.UTF_8)));
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException("The answer of the KMS worker is not valid.");
    }
  }

  /** Fails where what a file says of its columns is not what its table says; asks once for files that say the same. */
  void check(ObjectNode seen, String file) {
    ObjectNode request = seen.deepCopy();
    request.put("file", file);
    askOnce(CHECK, seen.toString(), request);
  }

  /**
   * Fails where a write is not as its table says, or where "keys" is true and one of its keys cannot be wrapped.
   *
   * @return the options that name the key of each column, as JSON
   */
  String checkWrite(ObjectNode write) {
    if (write.path("keys").asBoolean()) {
      return new String(ask(CHECK_WRITE, write.toString().getBytes(StandardCharsets.UTF_8)), StandardCharsets.UTF_8);
    }
    return askOnce(CHECK_WRITE, CHECK_WRITE + " " + write, write);
  }

  /** Asks once for requests that are answered alike. */
  private String askOnce(int operation, String alike, ObjectNode request) {
    synchronized (checked) {
      if (checked.containsKey(alike)) {
        return (String) checked.get(alike);
      }
    }
    String answer =
        new String(ask(operation, request.toString().getBytes(StandardCharsets.UTF_8)), StandardCharsets.UTF_8);
    synchronized (checked) {
      if (checked.size() >= MOST_CHECKED) {
        checked.clear();
      }
      checked.put(alike, answer);
    }
    return answer;
  }

  /** Returns what is the same for requests that this worker answers alike. */
  String identity() {
    return encodedConfiguration;
  }

  /** Adds the folders above a file that can give values, where its keys depend on these. */
  synchronized void addFolders(ObjectNode request, Path file) {
    if (!keysDependOnFiles()) {
      return;
    }
    String folders = "";
    for (Path folder = file.getParent(); folder != null; folder = folder.getParent()) {
      if (folder.getName().indexOf('=') >= 0 || folder.getName().indexOf('%') >= 0) {
        folders = folder.getName() + '/' + folders;
      }
    }
    request.put("in_folders", folders);
  }

  /** Returns whether there are keys by template: which keys a file has depends on its folders, or its values. */
  synchronized boolean keysDependOnFiles() {
    running();
    return facts.contains("templates");
  }

  /** Fails unless the keys of a file fit the values of its columns, as its footer states them. */
  void checkValues(ObjectNode seen, FileMetaData footer, String file) {
    synchronized (this) {
      running();
      if (!facts.contains("values")) {
        return;
      }
    }
    ObjectNode request = seen.deepCopy();
    request.put("file", file);
    request.remove("columns");
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try {
      Util.writeFileMetaData(footer, bytes);
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException("The footer of " + file + " cannot be compared with its keys.");
    }
    request.put("footer", bytes.toByteArray());
    ask(CHECK, request.toString().getBytes(StandardCharsets.UTF_8));
  }

  /** Asks the worker to wrap or unwrap a key; what is sent is zeroed then. */
  byte[] askForKey(int operation, byte[] key, String masterKeyId) {
    byte[] name = masterKeyId.getBytes(StandardCharsets.UTF_8);
    if (name.length > MOST_NAME_BYTES) {
      throw new ParquetCryptoRuntimeException("The identifier of a master key has " + name.length + " bytes.");
    }
    byte[] request = new byte[2 + name.length + key.length];
    request[0] = (byte) (name.length >> 8);
    request[1] = (byte) name.length;
    System.arraycopy(name, 0, request, 2, name.length);
    System.arraycopy(key, 0, request, 2 + name.length, key.length);
    try {
      return ask(operation, request);
    } finally {
      Arrays.fill(request, (byte) 0);
    }
  }

  /** Asks the worker, and once more where its process died meanwhile: wrapping twice does no harm. */
  byte[] ask(int operation, byte[] request) {
    for (int tries = 1; ; tries++) {
      WorkerProcess running = running();
      try {
        WorkerProcess.Answer answer = running.ask(operation, request, timeoutMilliseconds);
        if (answer.status == OK) {
          return answer.content;
        }
        String text = new String(answer.content, StandardCharsets.UTF_8);
        if (answer.status == DENIED) {
          throw new KeyAccessDeniedException(text);
        }
        throw new ParquetCryptoRuntimeException(text);
      } catch (WorkerGoneException gone) {
        if (tries == 2) {
          throw new ParquetCryptoRuntimeException(gone.getMessage() + " A retry of the task starts another.");
        }
      }
    }
  }

  /** Returns a process that has loaded the configuration. Others wait while it starts. */
  private synchronized WorkerProcess running() {
    if (process != null && process.isAlive()) {
      return process;
    }
    if (isEnding) {
      throw new ParquetCryptoRuntimeException("This JVM is ending: no KMS worker is started.");
    }
    process = null;
    WorkerProcess started = null;
    try {
      started = new WorkerProcess(python);
      // The folder where Spark puts spark.files: a configuration may be one of them.
      String message = filesFolder() + '\n' + new String(Base64.getDecoder().decode(encodedConfiguration), StandardCharsets.UTF_8);
      WorkerProcess.Answer answer = started.ask(START, message.getBytes(StandardCharsets.UTF_8), timeoutMilliseconds);
      if (answer.status != OK) {
        started.end(0);
        throw new WorkerGoneException(new String(answer.content, StandardCharsets.UTF_8));
      }
      facts = Arrays.asList(new String(answer.content, StandardCharsets.UTF_8).split(" "));
    } catch (IOException error) {
      throw new ParquetCryptoRuntimeException(
          "The KMS worker could not be started with " + python + ": " + error.getMessage()
              + ". Set spark.pyspark.python (for a catalog of Iceberg its property keytools.python) to a Python on every"
              + " node that has parquet-keytools.");
    } catch (WorkerGoneException gone) {
      String reason = gone.getMessage();
      if (started != null && !started.hasAnswered()) {
        reason += " Has " + python + " parquet-keytools installed? " + started.lastLine();
      }
      throw new ParquetCryptoRuntimeException(reason);
    }
    process = started;
    return started;
  }

  private static ArrayList all() {
    synchronized (WORKERS) {
      return new ArrayList(WORKERS.values());
    }
  }

  private static void endAll() {
    isEnding = true;
    for (Object worker : all()) {
      WorkerProcess process = ((KmsWorker) worker).process;
      if (process != null) {
        process.end(3000);
      }
    }
  }

  private static boolean isDriver() {
    SparkEnv environment = SparkEnv.get();
    return environment == null || "driver".equals(environment.executorId());
  }

  private static String filesFolder() {
    return SparkEnv.get() == null ? "" : new File(SparkFiles.getRootDirectory()).getAbsolutePath();
  }
}
