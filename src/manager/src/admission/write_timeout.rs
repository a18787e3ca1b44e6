//! A connection with write timeouts: it fails when the client does not read answers.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Timeouts of sending an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteTimeouts {
    /// Without a byte accepted by the client.
    pub stalled: Duration,
    /// From the first byte of an answer to the last.
    pub total: Duration,
}

/// A stream that fails when its peer does not read what was written.
pub(super) struct WriteTimeoutStream<S> {
    stream: S,
    timeouts: WriteTimeouts,
    /// Start of the current write, and time of the last progress.
    sending_since: Option<(Instant, Instant)>,
    deadline: Pin<Box<Sleep>>,
}

impl<S> WriteTimeoutStream<S> {
    pub fn new(stream: S, timeouts: WriteTimeouts) -> Self {
        Self {
            stream,
            timeouts,
            sending_since: None,
            deadline: Box::pin(sleep_until(Instant::now())),
        }
    }

    /// The result of a write; an error when it has been pending for too long.
    fn check_timeout<T>(&mut self, cx: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let now = Instant::now();
        let (began, progressed) = self.sending_since.get_or_insert((now, now));
        if sent.is_ready() {
            *progressed = now;
            return sent;
        }
        let deadline = (*progressed + self.timeouts.stalled).min(*began + self.timeouts.total);
        if self.deadline.deadline() != deadline {
            self.deadline.as_mut().reset(deadline);
        }
        ready!(self.deadline.as_mut().poll(cx));
        let why = "the client does not read its answer";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeoutStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeoutStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write(cx, buffer);
        this.check_timeout(cx, sent)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write_vectored(cx, buffers);
        this.check_timeout(cx, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called when all bytes are written.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_flush(cx);
        let sent = this.check_timeout(cx, sent);
        if sent.is_ready() {
            this.sending_since = None;
        }
        sent
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.check_timeout(cx, sent)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::sleep;

    use super::*;

    const TIMEOUTS: WriteTimeouts = WriteTimeouts {
        stalled: Duration::from_secs(5),
        total: Duration::from_secs(30),
    };

    async fn send(client: &mut WriteTimeoutStream<DuplexStream>, bytes: usize) -> io::Result<()> {
        client.write_all(&vec![0; bytes]).await?;
        client.flush().await
    }

    #[tokio::test(start_paused = true)]
    async fn unread_answer_closes_the_connection() {
        let (ours, _theirs) = duplex(10);
        let (began, mut ours) = (Instant::now(), WriteTimeoutStream::new(ours, TIMEOUTS));
        assert_eq!(
            send(&mut ours, 11).await.unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert_eq!(began.elapsed().as_secs(), TIMEOUTS.stalled.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn slowly_read_answer_closes_the_connection() {
        let (ours, mut theirs) = duplex(10);
        let reader = tokio::spawn(async move {
            while theirs.read_u8().await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
        });
        let (began, mut ours) = (Instant::now(), WriteTimeoutStream::new(ours, TIMEOUTS));
        assert_eq!(
            send(&mut ours, 1000).await.unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert_eq!(began.elapsed().as_secs(), TIMEOUTS.total.as_secs());
        reader.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn connection_lasts_while_answers_are_read() {
        let (ours, mut theirs) = duplex(10);
        let mut ours = WriteTimeoutStream::new(ours, TIMEOUTS);
        for _ in 0..10 {
            let mut read = [0; 20];
            let (sent, _) = tokio::join!(send(&mut ours, 20), async {
                sleep(TIMEOUTS.stalled / 2).await;
                theirs.read_exact(&mut read).await.unwrap()
            });
            sent.unwrap();
            sleep(TIMEOUTS.total * 2).await;
        }
    }
}
