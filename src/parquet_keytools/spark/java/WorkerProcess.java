package parquet_keytools;

import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.parquet.crypto.ParquetCryptoRuntimeException;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * One process of `python -m parquet_keytools.spark.kms_worker`. Keys go over its pipes and nowhere else.
 *
 * A frame is its length (4 bytes, big endian, of what follows), a request id (8), an operation or a status (1), and
 * the content; `kms_worker.py` is the other side.
 */
final class WorkerProcess {
  private static final Logger LOG = LoggerFactory.getLogger(WorkerProcess.class);
  private static final int HEADER_LENGTH = 9;
  private static final int MOST_BYTES = 1 << 24;
  private static final int MOST_LINE_CHARACTERS = 2000;

  private final Process process;
  private final DataOutputStream requests;
  private final Thread errorReader;
  private final Map pending = new HashMap();
  private long lastId = 0;
  private long framesReceived = 0;
  private String end = null;
  private boolean isEnding = false;
  private volatile String lastLine = "";

  WorkerProcess(String python) throws IOException {
    // -P: the working directory of an executor holds what jobs put there, and nothing to import.
    process = new ProcessBuilder(new String[] {python, "-P", "-m", "parquet_keytools.spark.kms_worker"}).start();
    requests = new DataOutputStream(process.getOutputStream());
    final DataInputStream answers = new DataInputStream(process.getInputStream());
    Thread reader = new Thread("parquet-keytools answers") {
      public void run() {
        receive(answers);
      }
    };
    reader.setDaemon(true);
    reader.start();
    errorReader = new Thread("parquet-keytools log") {
      public void run() {
        log();
      }
    };
    errorReader.setDaemon(true);
    errorReader.start();
  }

  /** Sends a request and waits for its answer, as many other threads may do. */
  Answer ask(int operation, byte[] content, long timeoutMilliseconds) throws WorkerGoneException {
    Answer answer = new Answer();
    Long id;
    long framesBefore;
    synchronized (pending) {
      if (end != null) {
        throw new WorkerGoneException(end);
      }
      id = Long.valueOf(++lastId);
      pending.put(id, answer);
      framesBefore = framesReceived;
    }
    try {
      send(id.longValue(), operation, content);
    } catch (IOException error) {
      // The reader sees the end too, and says more of it.
    }
    try {
      answer.await(timeoutMilliseconds);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw new ParquetCryptoRuntimeException("Interrupted while waiting for the KMS.");
    } finally {
      synchronized (pending) {
        pending.remove(id);
      }
    }
    if (answer.gone != null) {
      throw new WorkerGoneException(answer.gone);
    }
    if (answer.content == null) {
      boolean isSilent;
      synchronized (pending) {
        isSilent = framesReceived == framesBefore;
      }
      if (isSilent) {
        // It hangs: the next request gets another one.
        process.destroyForcibly();
      }
      throw new ParquetCryptoRuntimeException(
          "The KMS gave no answer in " + timeoutMilliseconds / 1000 + " seconds. A retry of the task asks again.");
    }
    return answer;
  }

  private void send(long id, int operation, byte[] content) throws IOException {
    if (content.length > MOST_BYTES - HEADER_LENGTH) {
      throw new ParquetCryptoRuntimeException("A request to the KMS has " + content.length + " bytes.");
    }
    synchronized (requests) {
      requests.writeInt(HEADER_LENGTH + content.length);
      requests.writeLong(id);
      requests.writeByte(operation);
      requests.write(content, 0, content.length);
      requests.flush();
    }
  }

  private void receive(DataInputStream answers) {
    String reason = "";
    try {
      while (true) {
        int length = answers.readInt();
        if (length < HEADER_LENGTH || length > MOST_BYTES) {
          reason = " (it printed to stdout, where only answers may stand)";
          break;
        }
        long id = answers.readLong();
        int status = answers.readUnsignedByte();
        byte[] content = new byte[length - HEADER_LENGTH];
        answers.readFully(content);
        Answer answer;
        synchronized (pending) {
          framesReceived++;
          answer = (Answer) pending.remove(Long.valueOf(id));
        }
        if (answer != null) {
          answer.give(status, content);
        }
      }
    } catch (IOException error) {
      // End of the stream: the process ended, or is about to.
    }
    String how = " ended";
    try {
      if (!process.waitFor(2, TimeUnit.SECONDS)) {
        process.destroyForcibly();
        process.waitFor(2, TimeUnit.SECONDS);
      }
      how = " ended with exit status " + process.exitValue();
    } catch (InterruptedException interrupted) {
      process.destroyForcibly();
    } catch (IllegalThreadStateException stillThere) {
      // It is in the hands of the system.
    }
    ArrayList waiting;
    synchronized (pending) {
      end = "The KMS worker process " + process.pid() + how + reason + ".";
      waiting = new ArrayList(pending.values());
      pending.clear();
    }
    if (!isEnding) {
      LOG.warn("{} {} requests were waiting.", end, Integer.valueOf(waiting.size()));
    }
    for (Object answer : waiting) {
      ((Answer) answer).giveUp(end);
    }
  }

  private void log() {
    try {
      BufferedReader lines = new BufferedReader(new InputStreamReader(process.getErrorStream(), StandardCharsets.UTF_8));
      String line;
      while ((line = lines.readLine()) != null) {
        line = line.replaceAll("\\p{Cntrl}", " ");
        if (line.length() > MOST_LINE_CHARACTERS) {
          line = line.substring(0, MOST_LINE_CHARACTERS);
        }
        lastLine = line;
        if (isEnding) {
          // The logging of a JVM that is ending may be gone already.
          System.err.println("KMS worker " + process.pid() + ": " + line);
        } else {
          LOG.info("KMS worker {}: {}", Long.valueOf(process.pid()), line);
        }
      }
    } catch (IOException error) {
      // There is nothing more to read.
    }
  }

  boolean isAlive() {
    synchronized (pending) {
      return end == null && process.isAlive();
    }
  }

  boolean hasAnswered() {
    synchronized (pending) {
      return framesReceived > 0;
    }
  }

  /** Returns the last line it wrote on stderr: Python's, where our code never ran. */
  String lastLine() {
    try {
      errorReader.join(500);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
    return lastLine;
  }

  /** Closes the pipe to it, upon which it ends, and waits so long for it. */
  void end(long milliseconds) {
    isEnding = true;
    try {
      // Not `requests.close()`: that would wait for a thread which is writing.
      process.getOutputStream().close();
    } catch (IOException error) {
      // It ended before.
    }
    if (milliseconds > 0) {
      try {
        if (!process.waitFor(milliseconds, TimeUnit.MILLISECONDS)) {
          process.destroyForcibly();
        }
        errorReader.join(500);
      } catch (InterruptedException interrupted) {
        process.destroyForcibly();
      }
    }
  }

  /** The answer to one request: content, or why there will be none, or neither after the time is up. */
  static final class Answer {
    int status = -1;
    byte[] content = null;
    String gone = null;

    synchronized void give(int status, byte[] content) {
      this.status = status;
      this.content = content;
      notifyAll();
    }

    synchronized void giveUp(String reason) {
      gone = reason;
      notifyAll();
    }

    synchronized void await(long milliseconds) throws InterruptedException {
      long deadline = System.nanoTime() + milliseconds * 1000000L;
      while (content == null && gone == null) {
        long left = (deadline - System.nanoTime()) / 1000000L;
        if (left <= 0) {
          return;
        }
        wait(left);
      }
    }
  }
}
