//! A connection on which answers must be taken: it breaks where the client does not read them.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// How long sending an answer may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Without a byte taken.
    pub stalled: Duration,
    /// In all, from its first byte to its last.
    pub whole: Duration,
}

/// A stream that can be written to while its other end takes what was written.
pub(super) struct Sending<S> {
    stream: S,
    patience: Patience,
    /// Since when there is something to be sent, and when some of it was taken last.
    since: Option<(Instant, Instant)>,
    limit: Pin<Box<Sleep>>,
}

impl<S> Sending<S> {
    pub fn new(stream: S, patience: Patience) -> Self {
        Self {
            stream,
            patience,
            since: None,
            limit: Box::pin(sleep_until(Instant::now())),
        }
    }

    /// What came of an attempt to send, which fails when it has waited for too long.
    fn bounded<T>(&mut self, cx: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let now = Instant::now();
        let (began, moved) = self.since.get_or_insert((now, now));
        if sent.is_ready() {
            *moved = now;
            return sent;
        }
        let limit = (*moved + self.patience.stalled).min(*began + self.patience.whole);
        if self.limit.deadline() != limit {
            self.limit.as_mut().reset(limit);
        }
        ready!(self.limit.as_mut().poll(cx));
        let why = "the client does not read its answer";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Sending<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, to)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Sending<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write(cx, from);
        this.bounded(cx, sent)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_write_vectored(cx, from);
        this.bounded(cx, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called when all was written.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_flush(cx);
        let sent = this.bounded(cx, sent);
        if sent.is_ready() {
            this.since = None;
        }
        sent
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let sent = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.bounded(cx, sent)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::sleep;

    use super::*;

    const PATIENCE: Patience = Patience {
        stalled: Duration::from_secs(5),
        whole: Duration::from_secs(30),
    };

    async fn send(client: &mut Sending<DuplexStream>, bytes: usize) -> io::Result<()> {
        client.write_all(&vec![0; bytes]).await?;
        client.flush().await
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_read_breaks_the_connection() {
        let (ours, _theirs) = duplex(10);
        let (began, mut ours) = (Instant::now(), Sending::new(ours, PATIENCE));
        assert_eq!(
            send(&mut ours, 11).await.unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert_eq!(began.elapsed().as_secs(), PATIENCE.stalled.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_byte_by_byte_breaks_the_connection_at_last() {
        let (ours, mut theirs) = duplex(10);
        let reader = tokio::spawn(async move {
            while theirs.read_u8().await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
        });
        let (began, mut ours) = (Instant::now(), Sending::new(ours, PATIENCE));
        assert_eq!(
            send(&mut ours, 1000).await.unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert_eq!(began.elapsed().as_secs(), PATIENCE.whole.as_secs());
        reader.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_lasts_while_its_answers_are_read() {
        let (ours, mut theirs) = duplex(10);
        let mut ours = Sending::new(ours, PATIENCE);
        for _ in 0..10 {
            let mut read = [0; 20];
            let (sent, _) = tokio::join!(send(&mut ours, 20), async {
                sleep(PATIENCE.stalled / 2).await;
                theirs.read_exact(&mut read).await.unwrap()
            });
            sent.unwrap();
            sleep(PATIENCE.whole * 2).await;
        }
    }
}
