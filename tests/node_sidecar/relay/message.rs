//! Messages between two processes, with an open file if there is one. Each is answered before the next is sent, so that
//! what is read at once is one message.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Longest message in bytes.
const MAX_MESSAGE: usize = 256;

pub async fn send(stream: &UnixStream, text: &str, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let write = || {
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let bytes = [IoSlice::new(text.as_bytes())];
        Ok(sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL)?)
    };
    stream.async_io(Interest::WRITABLE, write).await.map(drop)
}

pub async fn receive(stream: &UnixStream) -> io::Result<(String, Option<OwnedFd>)> {
    let read = || {
        let mut bytes = [0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
        Ok((text, file))
    };
    let (text, file) = stream.async_io(Interest::READABLE, read).await?;
    if text.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((text, file))
}
