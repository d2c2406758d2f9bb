package kalman.stores;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.UUID;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * A file of an object store that is created as a whole, and only if nobody else creates it.
 *
 * <p>The store decides: it is asked to refuse the object if one of that name is there (If-None-Match). The client must
 * honour the option, or `build` fails. Each creation has an identity of its own in the object's metadata, so that a
 * creation whose answer was lost is told from somebody else's by reading the object back. Where even that does not tell,
 * the creation fails and is not tried again: it may still arrive.
 *
 * <p>Compiled by Janino, which knows neither lambdas nor inferred types.
 */
public final class ConditionalFile {
    private static final String CONDITION = "fs.option.create.conditional.overwrite";
    private static final String HEADER = "fs.s3a.create.header.";
    private static final String IDENTITY = "kalman-write";
    private static final int READS = 5;
    private static final long PAUSE_MS = 300L;

    private final FileSystem files;
    private final Path path;
    private final String identity;
    private final FSDataOutputStream stream;

    /** Begin to create a file; nothing of it is seen before `commit`. */
    public ConditionalFile(FileSystem files, Path path) throws IOException {
        this.files = files;
        this.path = path;
        this.identity = UUID.randomUUID().toString();
        FSDataOutputStreamBuilder builder = files.createFile(path);
        builder.overwrite(false);
        builder.recursive();
        builder.must(CONDITION, "true");
        builder.must(HEADER + IDENTITY, this.identity);
        this.stream = (FSDataOutputStream) builder.build();
    }

    /** Return where to write the content. */
    public FSDataOutputStream stream() {
        return stream;
    }

    /**
     * Create the file with the content that was written.
     *
     * @throws FileAlreadyExistsException another creation won
     * @throws IOException it failed, or nobody can tell whether it did
     */
    public void commit() throws IOException {
        try {
            stream.close();
        } catch (IOException failure) {
            settle(failure);
        }
    }

    /** Give up: the file is not created. */
    public void abort() {
        abort(stream);
    }

    /** Keep a stream from making its object, as closing it would. */
    static void abort(FSDataOutputStream stream) {
        stream.abort();
    }

    /** Return if the object that is there is ours; throw if it is another's, or if there is none. */
    private void settle(IOException failure) throws IOException {
        String found = null;
        for (int read = 0; found == null && read < READS; read++) {
            if (read > 0) {
                pause();
            }
            found = stored();
        }
        if (identity.equals(found)) {
            return;
        }
        if (found != null) {
            FileAlreadyExistsException lost = new FileAlreadyExistsException(path + ": another process created it");
            lost.initCause(failure);
            throw lost;
        }
        throw new IOException(
            path + ": nobody can tell whether the store has created it (" + failure.getMessage()
                + "); it is not tried again, as it may still arrive", failure);
    }

    /** Return the identity of the object that is there; empty if it has none, null if nothing is known. */
    private String stored() {
        try {
            Map headers = files.getXAttrs(path);
            byte[] value = (byte[]) headers.get("header." + IDENTITY);
            return value == null ? "" : new String(value, StandardCharsets.UTF_8);
        } catch (FileNotFoundException absent) {
            return null;
        } catch (IOException unreachable) {
            return null;
        }
    }

    private static void pause() throws IOException {
        try {
            Thread.sleep(PAUSE_MS);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            throw new InterruptedIOException("interrupted while a file's creation was looked up");
        }
    }
}
