//! The end of the right to write: connections that send nothing more once the Lease that protects them may have a new
//! holder.
//!
//! A process that loses the Lease is notified and stops. But a process that was stopped, or had no CPU, for longer than
//! the Lease lasts continues with requests that it had begun to send, and with responses to others, before it handles
//! the loss. So the clock is checked where bytes leave.
//!
//! This bounds what is sent, not what is executed: the API server may execute later what arrived in time, and the clock
//! stops while a virtual machine is paused. Hence writes also carry the UID or resourceVersion that they were decided
//! on.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::TryFutureExt;
use futures::future::BoxFuture;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::time::Instant;
use tower::Service;

/// Until when bytes may be sent. Clones are the same fence.
#[derive(Clone, Debug)]
pub struct Fence(Arc<Mutex<Instant>>);

/// The deadline has passed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the Lease was not renewed in time, so nothing is sent")]
pub struct FenceClosed;

impl Fence {
    /// A closed fence.
    #[must_use]
    pub fn closed() -> Self {
        Self::new(Instant::now())
    }

    /// A fence that closes at `deadline`.
    #[must_use]
    pub fn new(deadline: Instant) -> Self {
        Self(Arc::new(Mutex::new(deadline)))
    }

    /// Extends the deadline.
    pub fn set_deadline(&self, deadline: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    /// Whether bytes may be sent.
    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        self.check_open().is_ok()
    }

    fn check_open(&self) -> io::Result<()> {
        let deadline = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if Instant::now() < deadline {
            Ok(())
        } else {
            Err(io::Error::other(FenceClosed))
        }
    }
}

/// Connects as another connector does; sent bytes then pass the fence, if there is one.
#[derive(Clone)]
pub(super) struct FencedConnector<C> {
    pub inner: C,
    pub fence: Option<Fence>,
}

impl<C> Service<Uri> for FencedConnector<C>
where
    C: Service<Uri>,
    C::Future: Send + 'static,
{
    type Response = FencedStream<C::Response>;
    type Error = C::Error;
    type Future = BoxFuture<'static, Result<Self::Response, C::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let fence = self.fence.clone();
        Box::pin(self.inner.call(uri).map_ok(|inner| FencedStream { inner, fence }))
    }
}

/// A connection with its fence.
pub(super) struct FencedStream<S> {
    inner: S,
    fence: Option<Fence>,
}

impl<S> FencedStream<S> {
    fn check_open(&self) -> io::Result<()> {
        self.fence.as_ref().map_or(Ok(()), Fence::check_open)
    }
}

impl<S: Connection> Connection for FencedStream<S> {
    fn connected(&self) -> Connected {
        self.inner.connected()
    }
}

impl<S: Read + Unpin> Read for FencedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<S: Write + Unpin> Write for FencedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_open()?;
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_open()?;
        Pin::new(&mut self.inner).poll_write_vectored(cx, parts)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hyper_util::rt::TokioIo;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn fence_blocks_writes_after_its_deadline() {
        let (near, _far) = tokio::io::duplex(64);
        let fence = Fence::new(Instant::now() + LONG);
        let mut stream = FencedStream {
            inner: TokioIo::new(near),
            fence: Some(fence.clone()),
        };
        let mut try_write = async || {
            let sent = std::future::poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, b"x")).await;
            let parts = [IoSlice::new(b"x")];
            let more = std::future::poll_fn(|cx| Pin::new(&mut stream).poll_write_vectored(cx, &parts)).await;
            (sent.is_ok(), more.is_ok())
        };
        assert_eq!(try_write().await, (true, true));
        fence.set_deadline(Instant::now());
        assert_eq!(try_write().await, (false, false));
        fence.set_deadline(Instant::now() + LONG);
        assert_eq!(try_write().await, (true, true));
    }
}
