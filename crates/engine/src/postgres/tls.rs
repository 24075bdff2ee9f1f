//! TLS to the database, with the server's certificate always checked.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream as Encrypted;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::session::read_pem;
use crate::error::{Error, Result};

/// Where Debian and its kin keep the authorities that they trust; then the others.
const SYSTEM: &[&str] =
    &["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// Whom to trust.
pub struct Verifier {
    config: Arc<ClientConfig>,
}

impl Verifier {
    /// Trusts the authorities in this file, or those of the system.
    pub fn load(file: Option<&Path>) -> Result<Verifier> {
        let system = || SYSTEM.iter().map(Path::new).find(|path| path.exists());
        let Some(path) = file.or_else(system) else {
            return Err(Error::Database {
                what: "no authorities are known to check its certificate with; give --pg-ca-file".into(),
            });
        };
        let mut roots = RootCertStore::empty();
        let certificates =
            CertificateDer::pem_slice_iter(&read_pem(path)?).filter_map(Result::ok).collect::<Vec<_>>();
        roots.add_parsable_certificates(certificates);
        if roots.is_empty() {
            return Err(Error::Database {
                what: format!("{} holds no certificate; give --pg-ca-file a PEM file", path.display()),
            });
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| Error::Database { what: format!("cannot set up TLS: {e}") })?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Verifier { config: Arc::new(config) })
    }
}

/// Makes encrypted connections.
#[derive(Clone)]
pub struct Connector {
    config: Arc<ClientConfig>,
}

impl Connector {
    /// With these authorities.
    pub fn new(verifier: &Verifier) -> Connector {
        Connector { config: verifier.config.clone() }
    }
}

impl<S> MakeTlsConnect<S> for Connector
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Stream<S>;
    type TlsConnect = To;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> io::Result<To> {
        let host = ServerName::try_from(host.to_owned()).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("`{host}` is no name to check"))
        })?;
        Ok(To { connector: TlsConnector::from(self.config.clone()), host })
    }
}

/// One connection to be encrypted.
pub struct To {
    connector: TlsConnector,
    host: ServerName<'static>,
}

impl<S> TlsConnect<S> for To
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Stream<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move { self.connector.connect(self.host, stream).await.map(Stream) })
    }
}

/// An encrypted connection.
pub struct Stream<S>(Encrypted<S>);

impl<S> TlsStream for Stream<S>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
