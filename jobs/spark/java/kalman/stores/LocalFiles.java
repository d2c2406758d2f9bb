package kalman.stores;

import java.io.IOException;
import java.io.OutputStream;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.CopyOption;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.InvalidPathException;
import java.nio.file.LinkOption;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.ChecksumFs;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FSError;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FsServerDefaults;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.local.LocalConfigKeys;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * The local file system of Hadoop's file contexts, by which Spark writes its checkpoints and Delta its commits, without
 * other processes. Where Hadoop's native library is absent, its own starts one (chmod, readlink) for each permission and
 * each look at a link: three to a file that is written beside its place and renamed into it, ten milliseconds each. It
 * also deletes a file before it renames another onto it, and looks whether one is there before it renames another to a
 * new name; here each is one step of the operating system. Files, names and check sums are the same.
 *
 * <p>Hadoop throws an Error (FSError) if a write fails, as on a full disk. Spark's state server catches an Exception
 * alone: its thread would end with its socket open, and the task would wait for ever. Here it is an IOException.
 */
public class LocalFiles extends ChecksumFs {
    public LocalFiles(URI uri, Configuration conf) throws IOException, URISyntaxException {
        super(new Raw(uri, conf));
    }

    /** The same without check sums. */
    public static class Raw extends DelegateToFileSystem {
        public Raw(URI uri, Configuration conf) throws IOException, URISyntaxException {
            super(uri, new Plain(), conf, "file", false);
        }

        public int getUriDefaultPort() {
            return -1;
        }

        public FsServerDefaults getServerDefaults(Path path) throws IOException {
            return LocalConfigKeys.getServerDefaults();
        }

        public FsServerDefaults getServerDefaults() throws IOException {
            return LocalConfigKeys.getServerDefaults();
        }

        public boolean isValidName(String name) {
            return true;
        }

        public void renameInternal(Path source, Path target, boolean overwrite) throws IOException {
            java.nio.file.Path from = file(source);
            java.nio.file.Path to = file(target);
            LinkOption[] asItIs = {LinkOption.NOFOLLOW_LINKS};
            if (from == null || to == null || !Files.isRegularFile(from, asItIs) || Files.isDirectory(to, asItIs)) {
                super.renameInternal(source, target, overwrite);
                return;
            }
            try {
                if (overwrite) {
                    Files.move(from, to, new CopyOption[] {StandardCopyOption.ATOMIC_MOVE});
                } else {
                    link(from, to);
                }
            } catch (UnsupportedOperationException error) {
                super.renameInternal(source, target, overwrite);
            } catch (FileSystemException error) {
                // There are no links here, or no folder: Hadoop's own way works, or says what is wrong.
                super.renameInternal(source, target, overwrite);
            }
        }
    }

    private static void link(java.nio.file.Path from, java.nio.file.Path to) throws IOException {
        try {
            Files.createLink(to, from);
        } catch (java.nio.file.FileAlreadyExistsException error) {
            // On a network's file system the answer to the first try may be lost.
            if (!Files.isSameFile(from, to)) {
                throw new FileAlreadyExistsException("rename destination " + to + " already exists.");
            }
        }
        try {
            Files.delete(from);
        } catch (IOException error) {
            // It has its name. What is left under the other one nothing reads.
        }
    }

    /** Hadoop's local files, with permissions, links and failures as Java has them. */
    public static class Plain extends RawLocalFileSystem {
        protected OutputStream createOutputStream(Path path, boolean append) throws IOException {
            return new Output(path, super.createOutputStream(path, append));
        }

        protected OutputStream createOutputStreamWithMode(Path path, boolean append, FsPermission permission)
            throws IOException {
            return new Output(path, super.createOutputStreamWithMode(path, append, permission));
        }

        public void setPermission(Path path, FsPermission permission) throws IOException {
            java.nio.file.Path file = file(path);
            if (file == null || permission.getStickyBit()) {
                super.setPermission(path, permission);
                return;
            }
            String bits = permission.getUserAction().SYMBOL + permission.getGroupAction().SYMBOL
                + permission.getOtherAction().SYMBOL;
            try {
                Files.setPosixFilePermissions(file, PosixFilePermissions.fromString(bits));
            } catch (UnsupportedOperationException error) {
                super.setPermission(path, permission);
            }
        }

        public FileStatus getFileLinkStatus(Path path) throws IOException {
            java.nio.file.Path file = file(path);
            boolean plain = file != null && !Files.isSymbolicLink(file);
            return plain ? getFileStatus(path) : super.getFileLinkStatus(path);
        }
    }

    /** A file that is written: a failure is an IOException that names the file. */
    private static class Output extends OutputStream {
        private final Path path;
        private final OutputStream stream;

        Output(Path path, OutputStream stream) {
            this.path = path;
            this.stream = stream;
        }

        public void write(int value) throws IOException {
            write(new byte[] {(byte) value}, 0, 1);
        }

        public void write(byte[] content, int from, int length) throws IOException {
            try {
                stream.write(content, from, length);
            } catch (FSError error) {
                throw failure(error);
            } catch (IOException error) {
                throw failure(error);
            }
        }

        public void flush() throws IOException {
            try {
                stream.flush();
            } catch (FSError error) {
                throw failure(error);
            } catch (IOException error) {
                throw failure(error);
            }
        }

        public void close() throws IOException {
            try {
                stream.close();
            } catch (FSError error) {
                throw failure(error);
            } catch (IOException error) {
                throw failure(error);
            }
        }

        private IOException failure(Throwable error) {
            Throwable cause = error instanceof FSError && error.getCause() != null ? error.getCause() : error;
            return new IOException(path.toUri().getPath() + ": " + cause.getMessage(), cause);
        }
    }

    /** Return Java's path, or null if the process's character set has not all of its letters. */
    private static java.nio.file.Path file(Path path) {
        try {
            return java.nio.file.Paths.get(path.toUri().getPath(), new String[0]);
        } catch (InvalidPathException error) {
            return null;
        }
    }
}
